"""What PPO needs, checked before Ray starts: this machine, models, tokenizer, data, rewards."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_like.algorithms.advantages import AdvantageOptions, get_adv_estimator_fn
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.algorithms.registry import read_options
from verl_like.data.conversations import ConversationDataset
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.data.sampler import EpochSampler
from verl_like.rewards.manager import RewardFunctionSpec, RewardManager
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.worker import Worker
from verl_like.trainer.config.actor_rules import VLLM
from verl_like.trainer.config.presets import aggregation_of_loss
from verl_like.trainer.config.roles import POLICY_KEY, Role, reward_model_key
from verl_like.trainer.config.rules import (
    critic_warmup_leaves_steps_for_the_actor,
    sequence_parallel,
    trained_models,
)
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.ppo.agent_inputs import check_agents
from verl_like.trainer.ppo.choice_of_replay import (
    empty_policy,
    has_experts,
    hf_config_of_policy,
    why_unrecorded,
    with_router_replay,
)
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
from verl_like.workers.models.distributed_experts import require_distributed_experts
from verl_like.workers.models.experts import experts_notes
from verl_like.workers.models.model_check import check_model
from verl_like.workers.models.packed_models import PackedModel, PolicyModel, RewardModel, ValueModel
from verl_like.workers.models.pretrained import TEACHER_PATH
from verl_like.workers.models.routed_experts import SWITCH_OFF
from verl_like.workers.models.router_replay import require_balance, require_replay, routers_of
from verl_like.workers.planning.partition import require_shares_of_heads
from verl_like.workers.rollout import get_rollout_engine
from verl_like.workers.rollout.base import special_token_ids
from verl_like.workers.rollout.vllm_families import require_served

NUM_TRIED_PROMPTS = 16
"""On how many prompts the tokenizer is tried."""
TRIED_CHARACTERS = 10_000
"""How many characters of such a prompt are tried."""


@dataclass(frozen=True)
class PPOInputs:
    """What PPO needs, after it was checked."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    train_dataset: PromptDataset
    val_dataset: PromptDataset
    role_worker_mapping: dict[str, RayClassWithInitArgs]
    scorer: RuleScorer | None
    notes: list[str]
    """What is shown to the user when the run begins: the numbers of prompts, and warnings."""
    ptx_dataset: ConversationDataset | None
    """The rows of `data.ptx_files`, or None without them."""


def check_inputs(config: PPOConfig, cleanup: contextlib.ExitStack) -> PPOInputs:
    """Checks the models, the data and the reward function, and starts the reward processes, which
    `cleanup` stops.

    The order of the checks is: the loss, this machine, the models, the room of the object store,
    the agents, the data with its tokens, the number of steps, the workers, and the rewards. Rows
    that no rule scores need a reward model, agents with rewards, or a custom role with
    reward_columns.

    No worker runs yet, so what the user has to change is known within seconds. It is raised as
    ValueError or RewardError.
    """
    paths = config.worker_classes.items()
    own_classes = {role: import_worker_class(role, path) for role, path in paths}
    check_policy_loss(config, own_classes)
    check_environment(config)
    config, notes_on_routers = with_router_replay(config)
    check_models(config)
    if not config.cluster_address:
        needed = step_bytes(config)
        if warning := check_object_store(needed):
            say(warning)
    tokenizer = pretrained.load_tokenizer(config.actor_rollout_ref.model)
    agents = check_agents(config, tokenizer)
    tools = agents.tools if agents else ()
    train_dataset = load_dataset(config, tokenizer, "train", tools)
    val_dataset = load_dataset(config, tokenizer, "val", tools)
    ptx_dataset = load_ptx_dataset(config, tokenizer)
    # Pairs (token, place).
    highest_tokens = [train_dataset.highest_token, val_dataset.highest_token]
    if ptx_dataset:
        highest_tokens.append(ptx_dataset.highest_token)
    check_tokens(config, tokenizer, max(highest_tokens))
    check_tokenizer(config, tokenizer, train_dataset)
    if config.trainer.max_staleness and not config.has_makers:
        # A checkpoint then holds rows with all their fields, so it must be possible to write them.
        first_row = train_dataset[0]
        batch = train_dataset.collate([first_row], epoch=0)
        with tempfile.TemporaryDirectory() as folder:
            batch.save_to_disk(f"{folder}/row")
    config = with_training_steps(config, len(train_dataset))
    mapping = build_role_worker_mapping(config, own_classes, agents)
    agents_reward = agents is not None and agents.has_reward
    scorer = None
    if not agents_reward or config.custom_reward_function.path:
        scorer = start_scorer(config, cleanup, tokenizer, train_dataset, val_dataset, mapping)
    notes = [_prompts_note("training", train_dataset), _prompts_note("validation", val_dataset)]
    if ptx_dataset:
        notes.append(f"{len(ptx_dataset):,} ptx rows ({ptx_dataset.num_truncated} cut)")
    notes += notes_on_aggregation(config)
    notes += notes_on_routers
    policy = config.actor_rollout_ref.model
    hf_config = hf_config_of_policy(config)
    notes += experts_notes(policy, hf_config, PolicyModel.auto_class, POLICY_KEY)
    return PPOInputs(
        config=config,
        tokenizer=tokenizer,
        train_dataset=train_dataset,
        val_dataset=val_dataset,
        role_worker_mapping=mapping,
        scorer=scorer,
        notes=notes,
        ptx_dataset=ptx_dataset,
    )


def check_tokenizer(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset
) -> None:
    """Raises ValueError if the tokenizer, tried on the first prompts, does not read what it writes,
    or if a teacher has another tokenizer."""
    policy = config.actor_rollout_ref
    render: Any = functools.partial(
        tokenizer.apply_chat_template, **config.data.apply_chat_template_kwargs
    )
    texts = []
    for row in itertools.islice(prompts, NUM_TRIED_PROMPTS):
        text = render(row["raw_prompt"], tokenize=False)
        texts.append(text[:TRIED_CHARACTERS])
    pretrained.check_tokenizer(tokenizer, policy.model, texts, key=POLICY_KEY)
    if config.plan.needs_teacher and policy.teacher_model:
        check_teacher(policy.teacher_model, tokenizer)


def start_scorer(
    config: PPOConfig,
    cleanup: contextlib.ExitStack,
    tokenizer: PreTrainedTokenizerBase,
    train_dataset: PromptDataset,
    val_dataset: PromptDataset,
    mapping: Mapping[str, RayClassWithInitArgs],
) -> RuleScorer | None:
    """Starts the reward processes and tries the reward function on rows of both data sets. Returns
    None, and starts nothing, if no row has a rule.

    `mapping` has the worker class of each role, which may declare reward columns. Raises ValueError
    if rows have no reward, or if the configuration names a reward that the run does not have.
    """
    scorer = None
    numbers = []
    scores_every_row = config.custom_reward_function.path is not None
    num_rows = len(train_dataset) + len(val_dataset)
    num_without_rule = 0
    if not scores_every_row:
        rows = itertools.chain(train_dataset, val_dataset)
        num_without_rule = sum(not has_rule(row["reward_model"]) for row in rows)
    # Reward processes are started only if some row is scored by a rule.
    if num_without_rule < num_rows:
        manager = start_reward_manager(config)
        cleanup.callback(manager.close)
        scorer = RuleScorer(manager, tokenizer, scores_every_row)
        numbers = scorer.check(train_dataset)
        scorer.check(val_dataset)
    columns = reward_columns(
        mapping, config.plan.reward_models_by_role, with_rules=scorer is not None
    )
    has_other_rewards = any(name not in RULE_COLUMNS for name in columns)
    if num_without_rule and not has_other_rewards:
        raise ValueError(
            f"nothing rewards the responses to {num_without_rule} of {num_rows} rows: their "
            "reward_model.style is 'model', but reward_model.enable is false and neither "
            "reward_models nor a custom role with reward_columns is there; enable the reward "
            "model, set custom_reward_function.path, or correct the rows."
        )
    if config.algorithm.filter_groups.enable and not scores_every_row:
        require_rules_of_training_rows(train_dataset)
    check_names_of_rewards(config, columns, numbers)
    return scorer


def _prompts_note(name: str, dataset: PromptDataset) -> str:
    """Says how many prompts there are, and how many were too long."""
    overlong = ""
    if dataset.num_filtered or dataset.num_truncated:
        overlong = (
            f" ({dataset.num_filtered} over-long ones left out, {dataset.num_truncated} truncated)"
        )
    return f"{len(dataset):,} {name} prompts{overlong}"


def require_rules_of_training_rows(train_dataset: PromptDataset) -> None:
    """Raises ValueError if no rule scores some training row.

    Dynamic sampling compares the scores that rules give, before other rewards are there, so a
    prompt without a rule would never count.
    """
    num_without_rule = sum(not has_rule(row["reward_model"]) for row in train_dataset)
    if num_without_rule:
        raise ValueError(
            "algorithm.filter_groups.enable=true compares the scores that rules give, but "
            f"{num_without_rule} of {len(train_dataset)} training rows have reward_model.style "
            "'model' and no rule; set filter_groups.enable=false, set "
            "custom_reward_function.path, or correct the rows."
        )


def check_names_of_rewards(
    config: PPOConfig, columns: Collection[str], numbers: Collection[str]
) -> None:
    """Raises ValueError if dynamic sampling or the estimator names a reward that the run does not
    have. `columns` are the reward columns, and `numbers` is what `RuleScorer.check` returned."""
    algorithm = config.algorithm
    if algorithm.filter_groups.enable:
        require_metric(algorithm.filter_groups.metric, ["reward", *numbers])
    estimator = get_adv_estimator_fn(algorithm.adv_estimator)
    options = read_options(estimator, algorithm=algorithm)
    if isinstance(options, AdvantageOptions):
        options.require_rewards([*columns, *numbers])


def check_policy_loss(config: PPOConfig, own_classes: Mapping[str, type[Worker]]) -> None:
    """Raises ValueError if the policy loss is not defined for `loss_agg_mode`, or if it needs the
    teacher's log-probabilities and no role writes them. `own_classes` has the user's worker classes
    by role."""
    actor = config.actor_rollout_ref.actor
    name = actor.policy_loss.loss_mode
    type_hints = get_type_hints(get_policy_loss_fn(name))
    hint = type_hints.get("loss_agg_mode")
    modes = get_args(hint)
    if get_origin(hint) is Literal and actor.loss_agg_mode not in modes:
        raise ValueError(
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}: the policy loss {name} "
            f"is defined only for {' and '.join(modes)}; set that"
        )
    missing = set(config.plan.loss_needs)
    for worker_class in own_classes.values():
        for method in registered_methods(worker_class).values():
            missing.difference_update(method.writes or ())
    if "teacher_log_prob" in missing and not config.plan.needs_teacher:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} needs teacher_log_prob, which "
            "no role of this run writes: add a custom role that does or, where the loss has that "
            f"option, set {TEACHER_PATH} to the folder or hub name of a model"
        )


def notes_on_aggregation(config: PPOConfig) -> list[str]:
    """Returns a warning in a list if the paper of the policy loss aggregates in another way than
    the configuration says, and else an empty list."""
    actor = config.actor_rollout_ref.actor
    name = actor.policy_loss.loss_mode
    mode = actor.loss_agg_mode
    own = aggregation_of_loss(name)
    if own in (mode, "token-mean"):  # a loss that is not tied to a mode has token-mean
        return []
    return [
        f"Warning: actor_rollout_ref.actor.loss_agg_mode={mode}, but the paper of the policy loss "
        f"{name} takes {own}: responses weigh otherwise than there; remove the key for the "
        "paper's loss."
    ]


def check_environment(config: PPOConfig) -> None:
    """Raises ValueError if the configuration names a rollout engine that does not exist, or needs a
    package, devices or processors that this machine does not have. A Ray cluster that runs already
    knows its own machines, so these are not checked."""
    engine = config.actor_rollout_ref.rollout.name
    get_rollout_engine(engine)
    runs_vllm = engine in VLLM
    if runs_vllm and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"actor_rollout_ref.rollout.name={engine}, but vllm is not installed: run bash "
            "scripts/environment.sh, or use rollout.name=hf to debug."
        )
    for key, model in used_models(config).items():
        require_flash_attention(model.attn_implementation, key)
    if not config.cluster_address:
        device = config.trainer.device
        manager = build_resource_pools(config)
        pools = list(manager.resource_pool_dict.values())
        num_cpus = config.ray_kwargs.ray_init.num_cpus
        check_machine(pools, device, num_cpus, keys="resource_pool_spec")
        if runs_vllm:
            require_vllm_for(device)
            compiles = config.actor_rollout_ref.rollout.enforce_eager is False
            if compiles and device == "cpu":
                require_compiler("actor_rollout_ref.rollout.enforce_eager=false")


def require_compiler(setting: str) -> None:
    """Raises ValueError if this machine lacks the compiler by which torch compiles for a CPU."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ValueError(
            f"{setting} has torch compile layers for the CPU, and the compiler {compiler} is not "
            "there: install g++ or name another one by CXX, or leave the setting out."
        )


def require_vllm_for(device: str) -> None:
    """Raises ValueError if the installed build of vLLM computes on another device than `device`."""
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
    """Returns the models of this run by their keys in the configuration. The policy is the
    first."""
    policy = config.actor_rollout_ref
    models: dict[str, ModelConfig] = {POLICY_KEY: policy.model}
    if config.plan.needs_teacher and policy.teacher_model:
        models[TEACHER_PATH] = policy.teacher_model
    if config.plan.needs_critic:
        models["critic.model"] = config.critic.model
    for role, reward in config.plan.reward_models_by_role.items():
        models[reward_model_key(role)] = reward.model
    return models


def check_models(config: PPOConfig) -> None:
    """Raises ValueError for models that are missing or do not fit the settings, or each other."""
    models = used_models(config)
    configs = {}
    for key, model in models.items():
        hf_config = pretrained.load_hf_config(model, key=key)
        configs[key] = hf_config.get_text_config()
    policy = configs[POLICY_KEY]
    data = config.data
    needed = data.max_prompt_length + data.max_response_length
    advice = (
        "data.max_prompt_length + data.max_response_length = "
        f"{data.max_prompt_length} + {data.max_response_length} = {needed} tokens: lower one of "
        "the two"
    )
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
    check_routers(config)
    check_distributed_experts(config)


def check_model_of_role(config: PPOConfig, key: str, model: ModelConfig) -> None:
    """Raises ValueError if files of a model are missing or do not fit, or if it has layers that the
    role cannot compute with its settings. The teacher counts as the actor here, and each further
    reward model as the first one.

    Neither shapes nor layers are checked if the role has a worker class of the user, which may make
    another model of the files.
    """
    files = pretrained.fetch_weights(model, key=key)
    role = Role.Actor
    model_class: type[PackedModel] = PolicyModel
    if key == "critic.model":
        role = Role.Critic
        model_class = ValueModel
    elif key.startswith("reward_model"):
        role = Role.RewardModel
        model_class = RewardModel
    size = 1
    if role != Role.RewardModel:
        size_key, size = sequence_parallel(config, role)
        hf_config = pretrained.load_hf_config(model, key=key)
        require_shares_of_heads(hf_config, size, size_key)
    if role not in config.worker_classes:
        makes_head = model_class is ValueModel
        check_model(
            model, model_class, files, key=key, makes_head=makes_head, sequence_parallel_size=size
        )


def check_tokens(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, highest: tuple[int, str]
) -> None:
    """Raises ValueError unless the policy has the tokens that end responses, the padding token, and
    `highest`, the highest token of the data with its place. The tokenizer itself may have more
    tokens than the policy."""
    model = config.actor_rollout_ref.model
    vocab_size = hf_config_of_policy(config).get_text_config().vocab_size
    end_tokens, padding = special_token_ids(tokenizer, model.path)
    highest_end = (max(end_tokens), "an end of a response")
    for token, place in [highest, highest_end, (padding, "the padding")]:
        if token >= vocab_size:
            raise ValueError(
                f"{place}: token {token} ({tokenizer.decode([token])!r}) is none of the "
                f"{vocab_size} of the model at actor_rollout_ref.model.path={model.path}: set "
                "actor_rollout_ref.model.tokenizer_path to the model's own tokenizer."
            )


def check_engine_reads(config: PPOConfig) -> None:
    """Raises ValueError if vLLM generates, and the family of the policy's model, or its adapter, is
    not known to compute the same in vLLM as in the trainer."""
    model = config.actor_rollout_ref.model
    engine = config.actor_rollout_ref.rollout.name
    if engine in VLLM:
        hf_config = hf_config_of_policy(config)
        setting = f"actor_rollout_ref.rollout.name={engine}"
        path = f"actor_rollout_ref.model.path={model.path}"
        require_served(hf_config, setting, path)
        num_sharing = config.actor_rollout_ref.rollout.expert_parallel_size
        if num_sharing > 1 and not has_experts(hf_config):
            raise ValueError(
                f"actor_rollout_ref.rollout.expert_parallel_size={num_sharing}: {path} has no "
                "experts that could be distributed; set it to 1"
            )
        latent_size = getattr(hf_config.get_text_config(), "kv_lora_rank", None)
        if latent_size and model.lora_rank:
            raise ValueError(
                f"actor_rollout_ref.model.lora_rank={model.lora_rank} with {setting}: {path} has "
                f"latent attention (kv_lora_rank={latent_size}), whose kv_b_proj vLLM takes apart "
                "as it reads the model, without an adapter; set rollout.name=hf, or lora_rank=0"
            )


def check_routers(config: PPOConfig) -> None:
    """Raises ValueError if the routing of experts is replayed, the experts are balanced, or routers
    frozen, and the policy's model has no routers with which that can be done."""
    policy = config.actor_rollout_ref
    actor = policy.actor
    wanted: list[tuple[str, str, str, Callable[[PreTrainedModel], Any]]] = []
    mode = actor.router_replay.chosen
    unrecorded = why_unrecorded(config) if mode == "R3" else None
    if unrecorded is not None:
        raise ValueError(
            "actor_rollout_ref.actor.router_replay.mode=R3 replays the routing of the rollout "
            f"engine, but {unrecorded}; set mode=R2, or disabled"
        )
    if mode != "disabled":
        wanted.append(("router_replay.mode", mode, "disabled", require_replay))
    if actor.router_aux_loss_coef:
        value = f"{actor.router_aux_loss_coef}"
        wanted.append(("router_aux_loss_coef", value, "0", require_balance))
    if actor.freeze_router:
        wanted.append(("freeze_router", "true", "false", routers_of))
    if not wanted:
        return
    hf = empty_policy(config)
    for name, value, off, require in wanted:
        key = f"actor_rollout_ref.actor.{name}"
        try:
            require(hf)
        except ValueError as error:
            reason = str(error).replace(SWITCH_OFF, f"set {key}={off}")
            model = f"actor_rollout_ref.model.path={policy.model.path}"
            raise ValueError(f"{key}={value} with {model}: {reason}") from error


def check_distributed_experts(config: PPOConfig) -> None:
    """Raises ValueError if the experts of a model that is trained cannot be distributed over ranks
    as its `expert_parallel_size` says."""
    classes: dict[str, type[PackedModel]] = {Role.Actor: PolicyModel, Role.Critic: ValueModel}
    for role, fsdp_key, key in trained_models(config):
        require_distributed_experts(
            attrgetter(key)(config),
            attrgetter(fsdp_key)(config),
            classes[role],
            config.num_processes(role),
            key=key,
            fsdp_key=fsdp_key,
        )


def check_teacher(model: PolicyModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError unless the teacher has the tokenizer of the policy. Its embeddings may have
    more rows than the tokenizer has tokens, as padding."""
    hf_config = pretrained.load_hf_config(model, key=TEACHER_PATH)
    vocab_size = hf_config.get_text_config().vocab_size
    # A teacher that is too small may have no tokenizer.
    is_own = vocab_size >= len(tokenizer)
    if is_own:
        own_tokenizer = pretrained.load_tokenizer(model)
        is_own = own_tokenizer.get_vocab() == tokenizer.get_vocab()
    if not is_own:
        raise ValueError(
            f"{TEACHER_PATH}={model.path}: the tokenizer of the teacher is not that of the "
            "policy, so it would read other words than the policy wrote; choose a teacher of the "
            "same tokenizer."
        )


def load_dataset(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    part: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptDataset:
    """Loads the prompts of a part of the data, "train" or "val", which tell the model of the
    agents' tools. The width of padded responses is the length that the rollout engine may draw."""
    data = config.data
    template_kwargs = dict(data.apply_chat_template_kwargs)
    if tools:
        template_kwargs["tools"] = list(tools)
    files = data.train_files if part == "train" else data.val_files
    return PromptDataset(
        list(files),
        tokenizer,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        max_prompt_length=data.max_prompt_length,
        max_response_length=config.actor_rollout_ref.rollout.response_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        truncation=data.truncation,
        max_samples=data.train_max_samples if part == "train" else data.val_max_samples,
        apply_chat_template_kwargs=template_kwargs,
    )


def prompt_sampler(config: PPOConfig, prompts: PromptDataset) -> EpochSampler:
    """Returns the sampler that says which prompts are in which batch."""
    data = config.data
    seed = config.trainer.seed
    return EpochSampler(len(prompts), data.train_batch_size, seed, data.shuffle)


def load_ptx_dataset(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> ConversationDataset | None:
    """Loads the rows of `data.ptx_files`, or returns None without such files. Raises ValueError if
    there are fewer rows than one batch takes."""
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
    """Fills in the number of steps of the run. Raises ValueError if the prompts are fewer than one
    batch takes, or if the critic's warm-up leaves no step for the actor."""
    sampler = EpochSampler(num_prompts, config.data.train_batch_size)
    steps_of_epochs = sampler.num_batches_per_epoch * config.trainer.total_epochs
    steps = config.trainer.total_training_steps or steps_of_epochs
    config = config.updated({"trainer.total_training_steps": steps})
    for problem in critic_warmup_leaves_steps_for_the_actor(config):
        raise ValueError(problem)
    return config


def start_reward_manager(config: PPOConfig) -> RewardManager:
    """Starts the reward processes with the reward function of the configuration."""
    function = config.custom_reward_function
    reward = config.reward
    spec = RewardFunctionSpec(function.path, function.name, function.reward_kwargs, config.plugins)
    return RewardManager(
        spec,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
        max_memory_gb=reward.max_memory_gb,
        redacted=config.redaction(),
    )
