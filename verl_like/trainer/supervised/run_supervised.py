"""A run of training on examples: its kinds, the check of its inputs, and the start of its
training."""

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl_like.data.conversations import ConversationDataset, ScoredDataset
from verl_like.data.preferences import PreferenceDataset
from verl_like.data.sampler import EpochSampler
from verl_like.single_controller.ray.resource_pool import RayResourcePool
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from verl_like.trainer.config.supervised import (
    DPOConfig,
    ILQLConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)
from verl_like.trainer.run.display import Display
from verl_like.trainer.run.machine import check_machine
from verl_like.trainer.run.run_recorder import RunRecorder, placement_rows
from verl_like.trainer.run.shell import run
from verl_like.trainer.run.worker_template import WorkerTemplate
from verl_like.trainer.state.run_state import LoopState
from verl_like.trainer.supervised.display import DPO_DISPLAY, ILQL_DISPLAY, RM_DISPLAY, SFT_DISPLAY
from verl_like.trainer.supervised.trainer import SupervisedTrainer
from verl_like.workers.models.attention import require_flash_attention
from verl_like.workers.models.distributed_experts import require_distributed_experts
from verl_like.workers.models.experts import experts_notes
from verl_like.workers.models.model_check import check_model
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.pretrained import (
    check_sequence_length,
    check_tokenizer,
    empty_model,
    fetch_weights,
    load_hf_config,
    load_tokenizer,
)
from verl_like.workers.models.routed_experts import SWITCH_OFF
from verl_like.workers.models.router_replay import own_aux_loss_coef, require_balance
from verl_like.workers.planning.partition import require_shares_of_heads
from verl_like.workers.rollout.base import special_token_ids
from verl_like.workers.supervised import (
    DPOWorker,
    ILQLWorker,
    RMWorker,
    SFTWorker,
    SupervisedWorker,
)


@dataclass(frozen=True)
class Kind:
    """What differs between SFT, reward models, DPO and ILQL."""

    worker: type[SupervisedWorker]
    dataset: type[ConversationDataset]
    display: Display


KINDS: dict[type[SupervisedConfig], Kind] = {
    SFTConfig: Kind(SFTWorker, ConversationDataset, SFT_DISPLAY),
    RMConfig: Kind(RMWorker, PreferenceDataset, RM_DISPLAY),
    DPOConfig: Kind(DPOWorker, PreferenceDataset, DPO_DISPLAY),
    ILQLConfig: Kind(ILQLWorker, ScoredDataset, ILQL_DISPLAY),
}


@dataclass(frozen=True)
class SupervisedInputs:
    """The checked inputs of training."""

    config: SupervisedConfig
    train_dataset: ConversationDataset
    val_dataset: ConversationDataset | None
    notes: list[str]
    """Notes for the user at the start of the run."""


def run_supervised(config: SupervisedConfig, template: WorkerTemplate | None = None) -> int:
    """Trains on examples and returns the exit code of the process."""
    return run(config, check_inputs, fit, KINDS[type(config)].display, template, LoopState)


def check_inputs(config: SupervisedConfig, cleanup: contextlib.ExitStack) -> SupervisedInputs:
    """Reads and checks the data, checks the model, and fills in the number of training steps.
    Raises ValueError for what the user has to change. No worker has been started then.

    `cleanup` is not used, because nothing is started here.
    """
    if not config.cluster_address:
        num_cpus = config.ray_kwargs.ray_init.num_cpus
        pool = pool_of(config)
        keys = "trainer.nnodes and trainer.n_gpus_per_node"
        check_machine([pool], config.trainer.device, num_cpus, keys=keys)
    require_flash_attention(config.model.attn_implementation, "model")
    kind = KINDS[type(config)]
    hf_config = load_hf_config(config.model, key="model")
    files = fetch_weights(config.model, key="model")
    sequence_parallel_size = config.training.ulysses_sequence_parallel_size
    require_shares_of_heads(
        hf_config, sequence_parallel_size, "training.ulysses_sequence_parallel_size"
    )
    check_model(
        config.model,
        kind.worker.model_class,
        files,
        key="model",
        makes_head=True,
        sequence_parallel_size=sequence_parallel_size,
    )
    require_distributed_experts(
        config.model,
        config.model.fsdp_config,
        kind.worker.model_class,
        config.num_processes_of_run,
        key="model",
        fsdp_key="model.fsdp_config",
    )
    notes = experts_notes(config.model, hf_config, kind.worker.model_class.auto_class, "model")
    if isinstance(config, SFTConfig):
        notes += check_balance(config, own_aux_loss_coef(hf_config))
    tokenizer = load_tokenizer(config.model)
    end_tokens, _padding = special_token_ids(tokenizer, config.model.path)
    data = config.data
    load = partial(
        kind.dataset,
        tokenizer=tokenizer,
        max_length=data.max_length,
        overlong=data.overlong,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        end_tokens=end_tokens,
    )
    train = load(data.train_files, max_samples=data.train_max_samples)
    val = None
    if data.val_files:
        val = load(data.val_files, max_samples=data.val_max_samples)
    datasets = [train, val] if val else [train]
    check_lengths(config, hf_config.get_text_config(), datasets)
    num_decoded = min(16, len(train))
    first_rows = [train.token_ids(row)[0].tolist() for row in range(num_decoded)]
    first_texts = tokenizer.batch_decode(first_rows)
    check_tokenizer(tokenizer, config.model, first_texts, key="model")
    if isinstance(config, RMConfig):
        last_tokens = set.union(*(one.last_tokens for one in datasets))
        config = with_padding_token(config, hf_config, tokenizer, last_tokens)
    # Raises ValueError if there are fewer rows than one batch takes.
    sampler = EpochSampler(len(train), data.train_batch_size)
    steps_of_epochs = sampler.num_batches_per_epoch * config.trainer.total_epochs
    steps = config.trainer.total_training_steps or steps_of_epochs
    config = config.updated({"trainer.total_training_steps": steps})
    return SupervisedInputs(config, train, val, notes + _notes(train, val))


def check_balance(config: SFTConfig, own_coefficient: float) -> list[str]:
    """Says how strongly the experts of a mixture are balanced, if their family is.

    Raises ValueError if `training.router_aux_loss_coef` is set, and they cannot be balanced.
    `own_coefficient` is that of the model's configuration.
    """
    given = config.training.router_aux_loss_coef
    if given == 0 or (given is None and not own_coefficient):
        return []
    key = "training.router_aux_loss_coef"
    if given is None and config.model.lora_rank:
        return [f"{key}=0: an adapter leaves the routers as they are"]
    if given is None and config.model.use_torch_compile:
        return [f"{key}=0: compiled layers do not tell what routers select"]
    hf = empty_model(config.model, PolicyModel.auto_class, key="model")
    try:
        require_balance(hf)
    except ValueError as error:
        reason = str(error).replace(SWITCH_OFF, f"set {key}=0")
        if given is None:
            return [f"{key}=0: {reason}"]
        raise ValueError(f"{key}={given} with model.path={config.model.path}: {reason}") from error
    if given is None:
        return [f"{key}={own_coefficient}, of the model's configuration"]
    return []


def _notes(train: ConversationDataset, val: ConversationDataset | None) -> list[str]:
    """Says how many rows there are, and warns if the model learns from none of them to end its
    answer."""
    too_long = ""
    if train.num_dropped or train.num_truncated:
        too_long = f" ({train.num_dropped} too long and left out, {train.num_truncated} cut)"
    notes = [f"{len(train):,} training {train.what}s{too_long}"]
    if val:
        notes.append(f"{len(val):,} validation {val.what}s")
    if not train.learns_to_end:
        notes.append(
            "Warning: no training row has an end-of-sequence token where it is learned, so the "
            "model does not learn to end: the chat template writes none behind an answer, or rows "
            "are cut; change the template."
        )
    return notes


def check_lengths(
    config: SupervisedConfig, hf_config: PretrainedConfig, datasets: list[ConversationDataset]
) -> None:
    """Raises ValueError if the model cannot read a token or so long a conversation, and if an
    example has more tokens than a pass may have."""
    token, place = max(one.highest_token for one in datasets)
    if token >= hf_config.vocab_size:
        raise ValueError(
            f"{place}: token {token} ({datasets[0].tokenizer.decode([token])!r}) is none of the "
            f"{hf_config.vocab_size} of the model at model.path={config.model.path}: set "
            "model.tokenizer_path to the model's own tokenizer."
        )
    training = config.training
    shorter = "lower data.max_length, with data.overlong=drop or truncate"
    longest, place = max(one.longest for one in datasets)
    advice = f"{place}: the conversation has {longest} tokens: {shorter}"
    check_sequence_length(hf_config, longest, f"model.path={config.model.path}", advice)
    ranks = training.ulysses_sequence_parallel_size
    tokens, place = max(one.largest for one in datasets)
    room = training.max_token_len_per_gpu * ranks
    if training.use_dynamic_bsz and tokens > room:
        raise ValueError(
            f"{place}: the {datasets[0].what} has {tokens} tokens, more than the {room} of a "
            f"pass: raise training.max_token_len_per_gpu, or {shorter}."
        )


def with_padding_token(
    config: RMConfig,
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    last_tokens: set[int],
) -> RMConfig:
    """Returns the configuration with the padding token in `model.override_config`.

    In each row transformers reads the reward at the last token that differs from the padding token.
    Raises ValueError if the model does not have the padding token, or if it is one of
    `last_tokens`, with which conversations end, because the reward would be read at a wrong place.
    """
    pad_token_id = getattr(hf_config, "pad_token_id", None)
    if pad_token_id is None:
        pad_token_id = tokenizer.pad_token_id
    size = hf_config.get_text_config().vocab_size
    if pad_token_id is not None:
        is_of_model = 0 <= pad_token_id < size
        if pad_token_id in last_tokens or not is_of_model:
            raise ValueError(
                f"the padding token {pad_token_id} of model.path={config.model.path} ends "
                f"conversations, or is none of the model's {size} tokens: transformers would read "
                "the reward at another token, or not load the model; set "
                "model.override_config.pad_token_id to one of its tokens that ends no "
                "conversation."
            )
    override = {**config.model.override_config, "pad_token_id": pad_token_id}
    return config.updated({"model.override_config": override})


def fit(inputs: SupervisedInputs, recorder: RunRecorder) -> None:
    """Starts the workers and trains until the last step."""
    config = inputs.config
    kind = KINDS[type(config)]
    group = RayWorkerGroup(
        pool_of(config),
        RayClassWithInitArgs(kind.worker, *worker_arguments(config)),
        role="model",
        deadline_s=config.trainer.call_timeout_s,
        on_call=recorder.record,
    )
    rows = placement_rows([("model_pool", ["model"], group)])
    recorder.show_placement(rows)
    training = SupervisedTrainer(config, inputs.train_dataset, inputs.val_dataset, group, recorder)
    training.init_workers()
    training.fit()


def pool_of(config: SupervisedConfig) -> RayResourcePool:
    """The pool on which the model is trained: one process on each device."""
    trainer = config.trainer
    processes_on_nodes = [trainer.n_gpus_per_node] * trainer.nnodes
    on_gpu = trainer.device == "cuda"
    return RayResourcePool(processes_on_nodes, on_gpu, "model_pool")


def worker_arguments(config: SupervisedConfig) -> tuple[Any, ...]:
    """The arguments of the constructor of every `SupervisedWorker`."""
    batch_size = config.data.train_batch_size
    steps = config.num_steps_of_run
    seed = config.trainer.seed
    return config.model, config.training, batch_size, steps, seed
