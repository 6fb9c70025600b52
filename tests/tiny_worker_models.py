"""Tiny Llama folders, batches and settings for the tests of the training workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from verl_like.protocol import DataProto
from verl_like.protocol.padded import without_padding
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config import PPOConfig
from verl_like.trainer.config.keys import default_tree
from verl_like.workers.config.roles import ActorRolloutRefConfig, CriticConfig, RewardModelConfig
from verl_like.workers.model_worker import TrainedWorker

VOCABULARY = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 .,+-*/=()?!:"]
PROMPT, RESPONSE = 5, 6


def write_model(path: Path, architecture: type = LlamaForCausalLM, tie: bool = False) -> str:
    """A randomly initialised Llama with two layers and grouped heads, and a tokenizer of single
    characters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=tie,
        num_labels=1,
        pad_token_id=0,
        eos_token_id=1,
    )
    architecture(config).save_pretrained(path)
    write_tokenizer(path)
    return str(path)


def write_tokenizer(path: Path) -> None:
    """The tokenizer of single characters."""
    tokenizer = Tokenizer(
        WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<pad>")
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(path)


def write_reward_model(path: Path) -> str:
    return write_model(path, LlamaForSequenceClassification)


def make_batch(rows: int = 8, seed: int = 0) -> DataProto:
    """Rows with prompts of 1 to 5 and responses of 1 to 6 tokens, and every column an update reads,
    jagged."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    prompt_lengths = torch.randint(1, PROMPT + 1, (rows, 1), generator=generator)
    response_lengths = torch.randint(1, RESPONSE + 1, (rows, 1), generator=generator)
    prompt_mask = (torch.arange(PROMPT) >= PROMPT - prompt_lengths).long()
    response_mask = (torch.arange(RESPONSE) < response_lengths).long()
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    input_ids = (
        torch.randint(2, len(VOCABULARY), (rows, PROMPT + RESPONSE), generator=generator)
        * attention_mask
    )
    in_verls_layout = DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "responses": input_ids[:, PROMPT:],
            "response_mask": response_mask,
            "old_log_probs": -4 + 0.5 * draw(rows, RESPONSE),
            "ref_log_prob": -4 + 0.5 * draw(rows, RESPONSE),
            "advantages": draw(rows, RESPONSE),
            "values": draw(rows, RESPONSE),
            "returns": draw(rows, RESPONSE),
        }
    )
    return without_padding(in_verls_layout, pad_token_id=0)


def with_defaults(section: str, settings: dict[str, Any]) -> Any:
    """The settings of a section over the defaults of a PPO run, which follow them."""
    tree = OmegaConf.merge(default_tree(PPOConfig), {section: settings})
    return OmegaConf.to_container(tree[section], resolve=True)


def policy_config(
    path: str,
    *,
    prompts: int = 8,
    micro: int = 8,
    budget: int | None = None,
    fsdp: dict[str, Any] | None = None,
    **actor: Any,
) -> ActorRolloutRefConfig:
    """Settings of the policy in float32: mini-batches of `prompts` rows, micro-batches of `micro`
    rows or of at most `budget` tokens."""
    fsdp_config = {"dtype": "float32", **(fsdp or {})}
    by_tokens = (
        {"log_prob_use_dynamic_bsz": True, "log_prob_max_token_len_per_gpu": budget}
        if budget
        else {}
    )
    actor = (
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": budget} if budget else {}
    ) | actor
    return ActorRolloutRefConfig.model_validate(
        with_defaults(
            "actor_rollout_ref",
            {
                "model": {"path": path},
                "actor": {
                    "ppo_mini_batch_size": prompts,
                    "ppo_micro_batch_size_per_gpu": micro,
                    "optim": {"lr": 1e-2},
                    "grad_clip": 1e6,
                    **actor,
                    "fsdp_config": fsdp_config,
                },
                "ref": {
                    "log_prob_micro_batch_size_per_gpu": micro,
                    "fsdp_config": {"dtype": "float32"},
                    **by_tokens,
                },
                "rollout": {
                    "prompt_length": PROMPT,
                    "response_length": RESPONSE,
                    "temperature": 0.7,
                    "log_prob_micro_batch_size_per_gpu": micro,
                    **by_tokens,
                },
            },
        )
    )


def local_group(worker_class: type, config: Any, **arguments: Any) -> LocalWorkerGroup:
    """One rank in this process, with its model loaded."""
    group = LocalWorkerGroup(ClassWithInitArgs(worker_class, config=config, **arguments))
    group.init_model()
    return group


def critic_config(path: str, *, prompts: int = 8, micro: int = 8, **critic: Any) -> CriticConfig:
    return CriticConfig.model_validate(
        with_defaults(
            "critic",
            {
                "model": {"path": path, "fsdp_config": {"dtype": "float32"}},
                "optim": {"lr": 1e-2},
                "ppo_mini_batch_size": prompts,
                "ppo_micro_batch_size_per_gpu": micro,
                "ppo_epochs": 1,
                "loss_agg_mode": "token-mean",
                "grad_clip": 1e6,
                **critic,
            },
        )
    )


def reward_config(path: str, **settings: Any) -> RewardModelConfig:
    return RewardModelConfig.model_validate(
        with_defaults(
            "reward_model",
            {
                "enable": True,
                "model": {"path": path, "fsdp_config": {"dtype": "float32"}},
                **settings,
            },
        )
    )


def parameters_of(worker: TrainedWorker) -> dict[str, torch.Tensor]:
    """Whole parameters by their Hugging Face names, copied."""
    return {name: p.detach().full_tensor().clone() for name, p in worker.engine.named_parameters()}


def gradients_of(
    worker: TrainedWorker, update: Callable[[], Any], after_clipping: bool = False
) -> tuple[dict[str, torch.Tensor], Any]:
    """Whole gradients that the last optimizer step of `update` found or, if asked for, applied; and
    its result."""
    engine, gradients = worker.engine, {}
    owner = engine.optimizer if after_clipping else engine
    step = owner.step

    def record(*args: Any, **kwargs: Any) -> Any:
        gradients.update(
            {name: p.grad.full_tensor().clone() for name, p in engine.named_parameters()}
        )
        return step(*args, **kwargs)

    owner.step = record
    return gradients, update()


def relative_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of any tensor's error, as a share of the tensor's norm."""
    return max(
        ((got[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected
    )
