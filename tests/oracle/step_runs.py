"""Runs the trainer's own steps on the responses of the world, in this process or in two, and says
what they did."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import step_world as world
import torch
from forked_workers import start_ray
from step_reference import Settings, Trained
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from verl_like.algorithms.aggregation import BatchCounts
from verl_like.algorithms.policy_losses import register_policy_loss
from verl_like.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla
from verl_like.protocol import DataProto, Metric, metric_values
from verl_like.protocol.row_ops import jagged_from_lists, jagged_parts
from verl_like.single_controller import Dispatch, register
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.resource_pool import RayResourcePool
from verl_like.single_controller.ray.worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.config.keys import default_tree, leaves
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.ppo import inputs as ppo_inputs
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker

ARCHITECTURES = {
    "policy": LlamaForCausalLM,
    "critic": LlamaForTokenClassification,
    "reward": LlamaForSequenceClassification,
}


@register_policy_loss("twice")
def twice_the_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    counts: BatchCounts,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    columns = old_log_prob, log_prob, advantages, response_mask
    loss, told = compute_policy_loss_vanilla(*columns, loss_agg_mode, config, counts=counts)
    return 2 * loss, told


def write_world(folder: Path) -> None:
    """Models, prompts and the reward function."""
    characters = Tokenizer(models.WordLevel(world.VOCABULARY, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    config = LlamaConfig(
        vocab_size=len(world.VOCABULARY),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=32,
        num_labels=1,
        initializer_range=0.3,
        pad_token_id=world.PAD,
        eos_token_id=world.EOS,
        bos_token_id=None,
    )
    for seed, kind in enumerate(("", "other_")):
        for name, architecture in ARCHITECTURES.items():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                architecture(config).save_pretrained(folder / f"{kind}{name}")
            tokenizer.save_pretrained(folder / f"{kind}{name}")
    rows = [
        {
            "data_source": "exact_match",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(world.PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    (folder / "reward.py").write_text(world.REWARD)
    (folder / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in world.TEXTS)
    )


class Configurable(Worker):
    """A worker that `configure` makes anew, so that one process serves several runs."""

    def __init__(self, **arguments: Any) -> None:
        if arguments:
            super().__init__(**arguments)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure(self, arguments: dict[str, Any]) -> None:
        self._mesh_coordinates.clear()
        self.__init__(**arguments)


class FixedRollout(Worker):
    """Answers with the responses of the world."""

    def __init__(self, config: Any, **_: Any) -> None:
        self.n, self.response_length = config.rollout.n, config.rollout.response_length

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, exported: list[Any], version: int, checks_first: bool) -> None:
        self.version = version

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=["input_ids", "attention_mask", "position_ids"],
    )
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        columns = prompts.batch
        prompt_ids, prompt_mask = (
            columns[name].numpy() for name in ("input_ids", "attention_mask")
        )
        tokens, mask = (
            np.zeros((len(prompts) * self.n, self.response_length), dtype=np.int64)
            for _ in range(2)
        )
        attended, log_probs = np.zeros_like(mask), np.zeros(mask.shape, dtype=np.float32)
        step = prompts.meta_info["global_steps"]
        for row in range(len(tokens)):
            i = row // self.n
            prompt = prompt_ids[i][prompt_mask[i] == 1].tolist()
            response = world.response(prompt, step, row % self.n)
            length = len(response.token_ids)
            tokens[row, :length], mask[row, :length] = response.token_ids, response.counts
            attended[row, :length], log_probs[row, :length] = 1, response.log_probs
        repeated = {name: column.repeat_interleave(self.n, 0) for name, column in columns.items()}
        positions = repeated["position_ids"][:, -1:] + torch.arange(1, self.response_length + 1)
        return DataProto.from_dict(
            tensors={
                "prompts": repeated["input_ids"],
                "responses": torch.from_numpy(tokens),
                "input_ids": torch.cat([repeated["input_ids"], torch.from_numpy(tokens)], dim=1),
                "attention_mask": torch.cat(
                    [repeated["attention_mask"], torch.from_numpy(attended)], dim=1
                ),
                "position_ids": torch.cat([repeated["position_ids"], positions], dim=1),
                "response_mask": torch.from_numpy(mask),
                "rollout_log_probs": torch.from_numpy(log_probs),
            },
            non_tensors={
                "policy_version": [((self.version, 0, int(length)),) for length in attended.sum(-1)]
            },
        )


class Recording(Configurable):
    """Remembers the gradient of every optimizer step."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        self.gradients: list[dict[str, torch.Tensor]] = []
        step = self.engine.step

        def record() -> Any:
            trained = [(n, p) for n, p in self.engine.named_parameters() if p.requires_grad]
            self.gradients.append({n: p.grad.full_tensor().clone() for n, p in trained})
            return step()

        self.engine.step = record

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learned(self) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """Gradients, and the present parameters."""
        parameters = {
            n: p.detach().full_tensor().clone() for n, p in self.engine.named_parameters()
        }
        return self.gradients, parameters


class RecordingPolicy(Recording, ActorWorker): ...


class ConfigurableReference(Configurable, ReferenceWorker): ...


class RecordingCritic(Recording, CriticWorker): ...


class ConfigurableRewardModel(Configurable, RewardModelWorker): ...


class ConfigurableRollout(Configurable, FixedRollout): ...


CLASSES = {
    "actor": RecordingPolicy,
    "ref": ConfigurableReference,
    "critic": RecordingCritic,
    "reward_model": ConfigurableRewardModel,
    "strict": ConfigurableRewardModel,
    "rollout": ConfigurableRollout,
}

StartGroups = Callable[[dict[str, RayClassWithInitArgs]], dict[str, WorkerGroup]]


class ShiftingMaker(ExperienceMaker):
    """Shifts what models compute before the update as the world says."""

    def collect(
        self, batch: DataProto, pending: Sequence[Any]
    ) -> tuple[DataProto, dict[str, Metric]]:
        batch, metrics = super().collect(batch, pending)
        for name in world.SHIFTS.keys() & batch.batch.keys():
            column = batch.batch[name]
            shifts = [
                [world.shift(name, row, t) for t in range(len(values))]
                for row, values in enumerate(column.unbind())
            ]
            values, offsets = jagged_parts(column)
            shifted = values + jagged_parts(jagged_from_lists(shifts, torch.float32))[0]
            batch.batch[name] = torch.nested.nested_tensor_from_jagged(shifted, offsets=offsets)
        return batch, metrics


class StepTrainer(RayPPOTrainer):
    """The trainer, on given worker groups and with a maker that shifts columns."""

    start: StartGroups

    def start_groups(self) -> dict[str, WorkerGroup]:
        mapping = self.role_worker_mapping.items()
        return self.start(
            {role: RayClassWithInitArgs(CLASSES[role], **c.kwargs) for role, c in mapping}
        )

    def build_maker(self) -> ExperienceMaker:
        return ShiftingMaker(**vars(super().build_maker()))


def start_local_groups(mapping: dict[str, RayClassWithInitArgs]) -> dict[str, WorkerGroup]:
    return {
        role: LocalWorkerGroup(worker_class, role=role) for role, worker_class in mapping.items()
    }


@contextlib.contextmanager
def two_processes() -> Iterator[StartGroups]:
    """Two processes that serve one run after the other."""
    start_ray(num_cpus=8)
    classes = {role: RayClassWithInitArgs(worker_class) for role, worker_class in CLASSES.items()}
    processes = RayWorkerGroup(
        RayResourcePool([2], use_gpu=False), create_colocated_worker_cls(classes)
    )

    def start(mapping: dict[str, RayClassWithInitArgs]) -> dict[str, WorkerGroup]:
        groups = processes.spawn(list(mapping))
        for role, group in groups.items():
            group.configure(mapping[role].kwargs)
        return groups

    yield start
    processes.shutdown()
    ray.shutdown()


def train(settings: Settings, start: StartGroups, steps: int) -> Trained:
    """What the trainer's own steps do under a configuration."""
    with contextlib.ExitStack() as cleanup:
        overrides = [f"{key}={as_override(value)}" for key, value in settings.items()]
        inputs = ppo_inputs.check_inputs(load_ppo_config(["device=cpu", *overrides]), cleanup)
        recorder = RunRecorder(inputs.config, PPO_DISPLAY)
        cleanup.callback(recorder.timeline_file.close)
        trainer = StepTrainer(
            inputs.config, inputs.tokenizer, inputs.role_worker_mapping, None, inputs.train_dataset,
            inputs.val_dataset, inputs.scorer, recorder, inputs.ptx_dataset,
        )  # fmt: skip
        trainer.start = start
        trainer.init_workers()
        metrics = []
        for _ in range(steps):
            trainer.global_step += 1
            metrics.append(metric_values(trainer.step()))
        learned = {
            role: trainer.groups[role].learned()
            for role in ("actor", "critic")
            if role in trainer.groups
        }
    return Trained(
        metrics,
        {role: of_ranks[0][0] for role, of_ranks in learned.items()},
        {role: of_ranks[0][1] for role, of_ranks in learned.items()},
    )


def as_override(value: object) -> str:
    """The value as Hydra writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {as_override(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def defaults(schema: type[RunConfig] = PPOConfig) -> Settings:
    """Of every key; None where it has none or another key decides."""
    tree = default_tree(schema)
    fields = {key: model.model_fields[name] for key, model, name in leaves(schema)}
    return {
        key: None if field.is_required() else reduce(dict.__getitem__, key.split("."), tree)
        for key, field in fields.items()
    }
