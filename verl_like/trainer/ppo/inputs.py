"""What PPO needs, checked before Ray starts: this machine, models, tokenizer, data, rewards."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformers import PreTrainedTokenizerBase

from verl_like.algorithms.advantages import AdvantageOptions, get_adv_estimator_fn
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.algorithms.registry import read_options
from verl_like.data.conversations import ConversationDataset
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.data.sampler import EpochSampler
from verl_like.rewards.manager import RewardFunctionSpec, RewardManager
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.ray.start import cluster_address
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.worker import Worker
from verl_like.trainer.config.presets import aggregation_of_loss
from verl_like.trainer.config.roles import Role, reward_model_key
from verl_like.trainer.config.rules import (
    critic_warmup_leaves_steps_for_the_actor,
    sequence_parallel,
)
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.ppo.object_store import check_object_store, step_bytes
from verl_like.trainer.ppo.scoring import (
    RULE_COLUMNS,
    RuleScorer,
    has_rule,
    require_metric,
    reward_columns,
)
from verl_like.trainer.ppo.workers import (
    build_resource_pools,
    build_role_worker_mapping,
    import_worker_class,
)
from verl_like.trainer.run.machine import check_machine
from verl_like.trainer.run.messages import say
from verl_like.workers.config.models import ModelConfig, PolicyModelConfig
from verl_like.workers.models import pretrained
from verl_like.workers.models.attention import require_flash_attention
from verl_like.workers.models.model_check import check_model
from verl_like.workers.models.packed_models import PackedModel, PolicyModel, RewardModel, ValueModel
from verl_like.workers.models.pretrained import TEACHER_PATH
from verl_like.workers.planning.partition import require_shares_of_heads
from verl_like.workers.rollout import get_rollout_engine
from verl_like.workers.rollout.base import special_token_ids
from verl_like.workers.rollout.vllm_families import require_served


@dataclass(frozen=True)
class PPOInputs:
    """What PPO needs, checked."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    train_dataset: PromptDataset
    val_dataset: PromptDataset
    role_worker_mapping: dict[str, RayClassWithInitArgs]
    scorer: RuleScorer | None
    notes: tuple[str, ...]
    """Numbers of prompts, and how the loss is aggregated."""
    ptx_dataset: ConversationDataset | None


def check_inputs(config: PPOConfig, cleanup: contextlib.ExitStack) -> PPOInputs:
    """Checks all input and starts the reward processes, which `cleanup` stops; raises ValueError or
    RewardError."""
    own_classes = {
        role: import_worker_class(role, path) for role, path in config.worker_classes.items()
    }
    check_policy_loss(config, own_classes)
    check_environment(config)
    check_models(config)
    starts_ray = not cluster_address(config.ray_kwargs.ray_init.address)
    if starts_ray and (warning := check_object_store(step_bytes(config))):
        say(warning)
    tokenizer = pretrained.load_tokenizer(config.actor_rollout_ref.model)
    train_dataset, val_dataset = (
        load_dataset(config, tokenizer, part) for part in ("train", "val")
    )
    ptx_dataset = load_ptx_dataset(config, tokenizer)
    highest_tokens = [
        dataset.highest_token for dataset in (train_dataset, val_dataset, ptx_dataset) if dataset
    ]
    check_tokens(config, tokenizer, max(highest_tokens))
    if (
        config.trainer.max_staleness and not config.has_makers
    ):  # a checkpoint then holds rows, with every field that they have
        with tempfile.TemporaryDirectory() as folder:
            train_dataset.collate([train_dataset[0]], epoch=0).save_to_disk(f"{folder}/row")
    render: Any = functools.partial(
        tokenizer.apply_chat_template, **config.data.apply_chat_template_kwargs
    )
    first_prompts = [
        render(row["raw_prompt"], tokenize=False)[:10_000]
        for row in itertools.islice(train_dataset, 16)
    ]
    pretrained.check_tokenizer(
        tokenizer, config.actor_rollout_ref.model, first_prompts, key="actor_rollout_ref.model"
    )
    if config.plan.needs_teacher and config.actor_rollout_ref.teacher_model:
        check_teacher(config.actor_rollout_ref.teacher_model, tokenizer)
    config = with_training_steps(config, len(train_dataset))
    scorer = None
    numbers: list[str] = []
    every_row = config.custom_reward_function.path is not None
    rows = [row["reward_model"] for dataset in (train_dataset, val_dataset) for row in dataset]
    num_without_rule = 0 if every_row else sum(not has_rule(row) for row in rows)
    if num_without_rule < len(rows):
        manager = start_reward_manager(config)
        cleanup.callback(manager.close)
        scorer = RuleScorer(manager, tokenizer, every_row)
        numbers = scorer.check(train_dataset)
        scorer.check(val_dataset)
    mapping = build_role_worker_mapping(config, own_classes)
    classes = {role: built.cls for role, built in mapping.items()}
    columns = reward_columns(
        classes, config.plan.reward_models_by_role, with_rules=scorer is not None
    )
    if num_without_rule and not columns.keys() - RULE_COLUMNS.keys():
        raise ValueError(
            f"nothing rewards the responses to {num_without_rule} of {len(rows)} rows: their "
            "reward_model.style is 'model', but reward_model.enable is false and neither "
            "reward_models nor a custom role with reward_columns is there; enable the reward "
            "model, set custom_reward_function.path, or correct the rows."
        )
    check_names_of_rewards(config, columns, numbers)
    notes = [_prompts_note("training", train_dataset), _prompts_note("validation", val_dataset)]
    notes += (
        [f"{len(ptx_dataset):,} ptx rows ({ptx_dataset.num_truncated} cut)"] if ptx_dataset else []
    )
    notes += notes_on_aggregation(config)
    return PPOInputs(
        config, tokenizer, train_dataset, val_dataset, mapping, scorer, tuple(notes), ptx_dataset
    )


def _prompts_note(name: str, dataset: PromptDataset) -> str:
    overlong = (
        f" ({dataset.num_filtered} over-long ones left out, {dataset.num_truncated} truncated)"
    )
    return (
        f"{len(dataset):,} {name} "
        f"prompts{overlong if dataset.num_filtered or dataset.num_truncated else ''}"
    )


def check_names_of_rewards(
    config: PPOConfig, columns: Collection[str], numbers: Collection[str]
) -> None:
    """Raises ValueError where dynamic sampling or the estimator names a reward that the run does
    not have. `numbers` is what `RuleScorer.check` returned."""
    algorithm = config.algorithm
    if algorithm.filter_groups.enable:
        require_metric(algorithm.filter_groups.metric, ["reward", *numbers])
    options = read_options(get_adv_estimator_fn(algorithm.adv_estimator), algorithm=algorithm)
    if isinstance(options, AdvantageOptions):
        options.require_rewards([*columns, *numbers])


def check_policy_loss(config: PPOConfig, own_classes: Mapping[str, type[Worker]]) -> None:
    """Raises ValueError where the policy loss is not defined for `loss_agg_mode`, or nothing writes
    what it needs."""
    actor = config.actor_rollout_ref.actor
    name = actor.policy_loss.loss_mode
    modes = get_type_hints(get_policy_loss_fn(name)).get("loss_agg_mode")
    if get_origin(modes) is Literal and actor.loss_agg_mode not in get_args(modes):
        raise ValueError(
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}: the policy loss {name} "
            f"is defined only for {' and '.join(get_args(modes))}; set that"
        )
    methods = [
        method
        for worker_class in own_classes.values()
        for method in registered_methods(worker_class).values()
    ]
    written = {column for method in methods for column in method.writes or ()}
    if "teacher_log_prob" in config.plan.loss_needs - written and not config.plan.needs_teacher:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} needs teacher_log_prob, which "
            "no role of this run writes: add a custom role that does or, where the loss has that "
            f"option, set {TEACHER_PATH} to the folder or hub name of a model"
        )


def notes_on_aggregation(config: PPOConfig) -> list[str]:
    """A warning where the policy loss is defined with another aggregation than the one that is
    set."""
    actor = config.actor_rollout_ref.actor
    name = actor.policy_loss.loss_mode
    mode = actor.loss_agg_mode
    own = aggregation_of_loss(name)
    if own in (mode, "token-mean"):  # token-mean stands for losses that are not tied to a mode
        return []
    return [
        f"Warning: actor_rollout_ref.actor.loss_agg_mode={mode}, but the paper of the policy loss "
        f"{name} takes {own}: responses weigh otherwise than there; remove the key for the "
        "paper's loss."
    ]


def check_environment(config: PPOConfig) -> None:
    """Raises ValueError for a device, package, registered name or placement that this machine does
    not have."""
    get_rollout_engine(config.actor_rollout_ref.rollout.name)
    address = cluster_address(config.ray_kwargs.ray_init.address)
    engine = config.actor_rollout_ref.rollout.name
    if engine in ("vllm", "vllm_async") and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"actor_rollout_ref.rollout.name={engine}, but vllm is not installed: run bash "
            "scripts/environment.sh, or use rollout.name=hf to debug."
        )
    for key, model in used_models(config).items():
        require_flash_attention(model.attn_implementation, key)
    if not address:
        pools = list(build_resource_pools(config).resource_pool_dict.values())
        check_machine(
            pools,
            config.trainer.device,
            config.ray_kwargs.ray_init.num_cpus,
            keys="resource_pool_spec",
        )
        if engine in ("vllm", "vllm_async"):
            require_vllm_for(config.trainer.device)


def require_vllm_for(device: str) -> None:
    """Raises ValueError if the build of vLLM that is installed computes on another device."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # its CPU build is a package of another name
        version = "cpu"
    built_for = "cpu" if "cpu" in version else "cuda"
    if device == "cpu" and built_for == "cuda":
        raise ValueError(
            "device=cpu, but the vllm that is installed is built for CUDA: run bash "
            "scripts/environment.sh cpu and use the Python of .venv_cpu, or train with "
            "device=cuda, or draw with rollout.name=hf."
        )
    if device == "cuda" and built_for == "cpu":
        raise ValueError(
            "device=cuda, but the vllm that is installed is built for the CPU: run bash "
            "scripts/environment.sh where the GPUs are, or train with device=cpu."
        )


def used_models(config: PPOConfig) -> dict[str, ModelConfig]:
    """The models of this run by their keys, the policy first."""
    policy = config.actor_rollout_ref
    models: dict[str, ModelConfig] = {"actor_rollout_ref.model": policy.model}
    if config.plan.needs_teacher and policy.teacher_model:
        models[TEACHER_PATH] = policy.teacher_model
    models |= {"critic.model": config.critic.model} if config.plan.needs_critic else {}
    return models | {
        reward_model_key(role): reward.model
        for role, reward in config.plan.reward_models_by_role.items()
    }


def check_models(config: PPOConfig) -> None:
    """Raises ValueError for models that are missing or do not fit the settings, or each other."""
    models = used_models(config)
    configs = {
        key: pretrained.load_hf_config(model, key=key).get_text_config()
        for key, model in models.items()
    }
    policy = configs["actor_rollout_ref.model"]
    needed = config.data.max_prompt_length + config.data.max_response_length
    lengths = (
        f"{config.data.max_prompt_length} + {config.data.max_response_length} = {needed} tokens"
    )
    advice = f"data.max_prompt_length + data.max_response_length = {lengths}: lower one of the two"
    for key, hf_config in configs.items():
        path = f"{pretrained.model_setting(key, 'path')}={models[key].path}"
        pretrained.check_sequence_length(hf_config, needed, path, advice)
        if hf_config.vocab_size != policy.vocab_size and key != TEACHER_PATH:
            raise ValueError(
                f"{key}.path={models[key].path} has {hf_config.vocab_size} token ids, the policy "
                f"{policy.vocab_size}: it would read other words than the policy wrote; choose a "
                "model of the same vocabulary."
            )
    for key, model in models.items():
        check_model_of_role(config, key, model)
    check_engine_reads(config)


def check_model_of_role(config: PPOConfig, key: str, model: ModelConfig) -> None:
    """Raises ValueError for files that are missing or do not fit, and layers that the role's
    settings cannot compute.

    A worker class of the user's own may make another model of the files, whose layers are not
    checked.
    """
    files = pretrained.fetch_weights(model, key=key)
    role: Role
    model_class: type[PackedModel]
    if key.startswith("reward_model"):
        role = Role.RewardModel
        model_class = RewardModel
        size = 1
    else:
        role, model_class = (
            (Role.Critic, ValueModel) if key == "critic.model" else (Role.Actor, PolicyModel)
        )
        size_key, size = sequence_parallel(config, role)
        require_shares_of_heads(pretrained.load_hf_config(model, key=key), size, size_key)
    if role not in config.worker_classes:
        makes_head = model_class is ValueModel
        check_model(
            model, model_class, files, key=key, makes_head=makes_head, sequence_parallel_size=size
        )


def check_tokens(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, highest: tuple[int, str]
) -> None:
    """Raises ValueError unless the policy has the tokens that end responses and the `highest` of
    the data, which comes with its place."""
    model = config.actor_rollout_ref.model
    size = (
        pretrained.load_hf_config(model, key="actor_rollout_ref.model").get_text_config().vocab_size
    )
    end_tokens, padding = special_token_ids(tokenizer, model.path)
    tokens = [highest, (max(end_tokens), "an end of a response"), (padding, "the padding")]
    for token, place in tokens:
        if token >= size:
            raise ValueError(
                f"{place}: token {token} ({tokenizer.decode([token])!r}) is none of the {size} of "
                f"the model at actor_rollout_ref.model.path={model.path}: set "
                "actor_rollout_ref.model.tokenizer_path to the model's own tokenizer."
            )


def check_engine_reads(config: PPOConfig) -> None:
    """Raises ValueError for a policy whose family is not shown to compute the same in vLLM as in
    the trainer."""
    model = config.actor_rollout_ref.model
    engine = config.actor_rollout_ref.rollout.name
    if engine in ("vllm", "vllm_async"):
        hf_config = pretrained.load_hf_config(model, key="actor_rollout_ref.model")
        setting = f"actor_rollout_ref.rollout.name={engine}"
        require_served(hf_config, setting, f"actor_rollout_ref.model.path={model.path}")


def check_teacher(model: PolicyModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a teacher that reads other words than the policy writes. Its embeddings
    may be padded."""
    size = pretrained.load_hf_config(model, key=TEACHER_PATH).get_text_config().vocab_size
    if (
        size < len(tokenizer)
        or pretrained.load_tokenizer(model).get_vocab() != tokenizer.get_vocab()
    ):
        raise ValueError(
            f"{TEACHER_PATH}={model.path}: the tokenizer of the teacher is not that of the "
            "policy, so it would read other words than the policy wrote; choose a teacher of the "
            "same tokenizer."
        )


def load_dataset(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, part: str) -> PromptDataset:
    """The prompts of `part`, "train" or "val"."""
    data = config.data
    return PromptDataset(
        list(data.train_files if part == "train" else data.val_files),
        tokenizer,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        max_prompt_length=data.max_prompt_length,
        max_response_length=config.actor_rollout_ref.rollout.response_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        truncation=data.truncation,
        max_samples=data.train_max_samples if part == "train" else data.val_max_samples,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )


def prompt_sampler(config: PPOConfig, prompts: PromptDataset) -> EpochSampler:
    """The order of the prompts, by the batch of each training step."""
    data = config.data
    trainer = config.trainer
    return EpochSampler(
        len(prompts), data.train_batch_size, seed=trainer.seed, shuffle=data.shuffle
    )


def load_ptx_dataset(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> ConversationDataset | None:
    """The rows of `data.ptx_files`, or None where there are none; raises ValueError if they are not
    one batch."""
    data = config.data
    if not data.ptx_files:
        return None
    dataset = ConversationDataset(
        data.ptx_files,
        tokenizer,
        max_length=data.max_prompt_length + data.max_response_length,
        overlong="truncate",
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    EpochSampler(len(dataset), data.ptx_batch_size, key="data.ptx")
    return dataset


def with_training_steps(config: PPOConfig, num_prompts: int) -> PPOConfig:
    """Fills in the number of steps of the run; raises ValueError if the critic's warm-up leaves
    none for the actor."""
    sampler = EpochSampler(num_prompts, config.data.train_batch_size)
    steps = (
        config.trainer.total_training_steps
        or sampler.num_batches_per_epoch * config.trainer.total_epochs
    )
    config = config.updated({"trainer.total_training_steps": steps})
    for problem in critic_warmup_leaves_steps_for_the_actor(config):
        raise ValueError(problem)
    return config


def start_reward_manager(config: PPOConfig) -> RewardManager:
    function = config.custom_reward_function
    reward = config.reward
    return RewardManager(
        RewardFunctionSpec(function.path, function.name, function.reward_kwargs, config.plugins),
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
        max_memory_gb=reward.max_memory_gb,
        redacted=config.redaction(),
    )
