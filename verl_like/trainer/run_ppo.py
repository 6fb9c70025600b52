"""From a validated configuration to a finished run: checks every input, starts Ray, trains, and ends cleanly."""

import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import ray
import torch
from transformers import PreTrainedTokenizerBase

from verl_like.algorithms.advantages import get_adv_estimator_fn
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.data.sampler import EpochSampler
from verl_like.rewards.manager import RewardError, RewardFunctionSpec, RewardManager
from verl_like.single_controller.failure import CallTimeout, PlacementError, WorkerError
from verl_like.single_controller.ray.cluster import assign
from verl_like.single_controller.ray.resource_pool import RayResourcePool, ResourcePoolManager
from verl_like.single_controller.ray.start import cluster_address, require_cluster, start_ray
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.worker import Worker
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.memory import require_memory
from verl_like.trainer.object_store import check_object_store, step_bytes
from verl_like.trainer.ppo_trainer import RayPPOTrainer
from verl_like.trainer.roles import Role, process_groups
from verl_like.trainer.run_recorder import RunRecorder
from verl_like.trainer.scoring import RULE_COLUMNS, RuleScorer, has_rule, reward_columns
from verl_like.trainer.tracking import require_trackers
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.models.attention import require_flash_attention
from verl_like.workers.models.pretrained import (
    check_sequence_length,
    check_tokenizer,
    fetch_weights,
    load_hf_config,
    load_tokenizer,
)
from verl_like.workers.planning.partition import require_shares_of_heads
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker
from verl_like.workers.rollout_worker import RolloutWorker


@dataclass(frozen=True)
class Inputs:
    """What a run needs, checked: it can start without a mistake of the user's coming to light later."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    train_dataset: PromptDataset
    val_dataset: PromptDataset
    role_worker_mapping: dict[str, RayClassWithInitArgs]
    scorer: RuleScorer | None
    memory: str | None
    """The sum of a GPU's memory; None without GPUs here."""


def run_ppo(config: PPOConfig) -> int:
    """Runs PPO and returns the exit code: 0 done, 1 a part of the run failed, 2 input refused, 130 interrupted.

    Everything a user can get wrong is checked before Ray starts. However the run ends, the processes it started are
    gone and what it wrote so far is valid.
    """
    # A pre-empted run ends as cleanly as an interrupted one; so does one that a shell started in the background, where
    # interrupts are ignored.
    handle_signals(signal.default_int_handler)
    with contextlib.ExitStack() as cleanup:
        try:
            inputs = check_inputs(config, cleanup)
            recorder = RunRecorder(inputs.config)
        except (ValueError, RewardError) as error:
            return _say(str(error), 2)
        except KeyboardInterrupt:
            return _say("interrupted before the run started", 130)
        return train(inputs, recorder)


def train(inputs: Inputs, recorder: RunRecorder) -> int:
    """Starts Ray and the workers and trains to the end; returns the exit code."""
    outcome = "Failed with an unexpected error; standard error has the traceback."
    try:
        for name, dataset in (("training", inputs.train_dataset), ("validation", inputs.val_dataset)):
            overlong = f" ({dataset.num_filtered} over-long ones left out, {dataset.num_truncated} truncated)"
            some = dataset.num_filtered or dataset.num_truncated
            recorder.console.say(f"{len(dataset):,} {name} prompts{overlong if some else ''}")
        if inputs.memory:
            recorder.console.say(inputs.memory)
        recorder.console.say("Starting Ray, the workers and the inference engines ...")
        ray_init = inputs.config.ray_kwargs.ray_init
        start_ray(cluster_address(ray_init.address), ray_init.num_cpus)
        trainer = RayPPOTrainer(
            inputs.config,
            inputs.tokenizer,
            inputs.role_worker_mapping,
            build_resource_pools(inputs.config),
            inputs.train_dataset,
            inputs.val_dataset,
            inputs.scorer,
            recorder,
        )
        trainer.init_workers()
        trainer.fit()
        outcome = f"Done: {trainer.global_step} training steps."
        return 0
    except KeyboardInterrupt:
        outcome = "Interrupted; what was written so far is valid."
        return 130
    except (WorkerError, CallTimeout, RewardError, PlacementError) as error:
        outcome = f"Stopped: {error.headline() if isinstance(error, WorkerError) else error}"
        return _say("\n".join([str(error), *getattr(error, "__notes__", [])]), 1)
    finally:
        # A second signal loses no report. Ray's shutdown comes last: in it, SIGTERM ends the process at once.
        handle_signals(signal.SIG_IGN)
        recorder.close(outcome)
        ray.shutdown()
        handle_signals(signal.default_int_handler)


def handle_signals(handler: Any) -> None:
    """Gives what stops a run, an interrupt or SIGTERM, to `handler`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _say(message: str, exit_code: int) -> int:
    sys.stderr.write(f"\nverl_like: {message}\n")
    return exit_code


def check_inputs(config: PPOConfig, cleanup: contextlib.ExitStack) -> Inputs:
    """Checks everything a user can get wrong and starts the reward processes, which `cleanup` stops.

    Raises:
        ValueError, RewardError: what is wrong, and what to do.
    """
    # First, because these modules may register advantage estimators and losses that the configuration names.
    own_classes = {role: import_worker_class(role, path) for role, path in config.worker_classes.items()}
    check_environment(config)
    check_models(config)
    starts_ray = not cluster_address(config.ray_kwargs.ray_init.address)
    memory = None
    if config.trainer.device == "cuda" and torch.cuda.is_available() and starts_ray:
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        memory = require_memory(config, min(device.total_memory for device in devices))
    if starts_ray and (warning := check_object_store(step_bytes(config))):
        _say(warning, 0)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    train_dataset, val_dataset = (load_dataset(config, tokenizer, part) for part in ("train", "val"))
    render = functools.partial(tokenizer.apply_chat_template, **config.data.apply_chat_template_kwargs)
    first_prompts = [render(row["raw_prompt"], tokenize=False) for row in itertools.islice(train_dataset, 16)]
    check_tokenizer(tokenizer, config.actor_rollout_ref.model, first_prompts)
    config = with_training_steps(config, training_steps(config, len(train_dataset)))
    scorer = None
    every_row = config.custom_reward_function.path is not None
    rows = [row["reward_model"] for dataset in (train_dataset, val_dataset) for row in dataset]
    num_without_rule = 0 if every_row else sum(not has_rule(row) for row in rows)
    if num_without_rule < len(rows):
        manager = start_reward_manager(config)
        cleanup.callback(manager.close)
        scorer = RuleScorer(manager, tokenizer, every_row)
        scorer.check(train_dataset)
        scorer.check(val_dataset)
    mapping = build_role_worker_mapping(config, own_classes)
    columns = reward_columns({role: built.cls for role, built in mapping.items()}, with_rules=scorer is not None)
    if num_without_rule and not columns.keys() - RULE_COLUMNS.keys():
        raise ValueError(
            f"nothing rewards the responses to {num_without_rule} of {len(rows)} rows: their reward_model.style is "
            "'model', but reward_model.enable is false and no role of your own has reward_columns; enable the reward "
            "model, set custom_reward_function.path, or correct the rows."
        )
    return Inputs(config, tokenizer, train_dataset, val_dataset, mapping, scorer, memory)


def check_environment(config: PPOConfig) -> None:
    """Raises ValueError for a device, package, registered name or placement that this machine does not have."""
    get_adv_estimator_fn(config.algorithm.adv_estimator)
    get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    require_trackers(config.trainer.logger)
    address = cluster_address(config.ray_kwargs.ray_init.address)
    if config.trainer.device == "cuda" and not address and not torch.cuda.is_available():
        raise ValueError(
            "trainer.device=cuda, but this machine has no CUDA device: give device=cpu to compute on the CPU, or "
            "ray_kwargs.ray_init.address to use a cluster that has GPUs."
        )
    if config.actor_rollout_ref.rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "actor_rollout_ref.rollout.name=vllm, but vllm is not installed: run bash scripts/environment.sh, "
            "or use rollout.name=hf to debug."
        )
    models = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    models |= {"critic.model": config.critic.model} if config.needs_critic else {}
    models |= {"reward_model.model": config.reward_model.model} if config.reward_model.enable else {}
    for key, model in models.items():
        require_flash_attention(model.attn_implementation, key)
    if address:
        require_cluster(address)
    else:
        check_pools_fit_this_machine(config)


def check_pools_fit_this_machine(config: PPOConfig) -> None:
    """Raises ValueError with the sums unless the pools fit on the one node of a Ray that is started here."""
    use_gpu = config.trainer.device == "cuda"
    node = {
        "CPU": config.ray_kwargs.ray_init.num_cpus or os.cpu_count() or 1,
        "GPU": torch.cuda.device_count() if use_gpu else 0,
    }
    pools = [
        RayResourcePool(list(processes), use_gpu, name, max_colocate_count(config))
        for name, processes in config.resource_pool_spec.items()
    ]
    entries = [entry for pool in pools for entry in pool.node_requests()]
    if assign(entries, {"here": node}) is not None:
        return
    lines = [f"  {pool.name:<32} {pool.process_on_nodes} processes" for pool in pools]
    needed = {kind: sum(entry[kind] for entry in entries) for kind in entries[0]}
    raise ValueError(
        "the resource pools do not fit on this machine:\n"
        + "\n".join(lines)
        + f"\n  each process takes {pools[0].bundle_resources()}, together {needed}; this machine has {node}\n"
        "Make the pools smaller (resource_pool_spec), set ray_kwargs.ray_init.num_cpus if its CPU slots may be "
        "oversubscribed, or give ray_kwargs.ray_init.address of a cluster."
    )


def check_models(config: PPOConfig) -> None:
    """Raises ValueError for models that are missing or do not fit the settings, or each other."""
    policy = load_hf_config(config.actor_rollout_ref.model, key="actor_rollout_ref.model").get_text_config()
    needed = config.data.max_prompt_length + config.data.max_response_length
    longest = getattr(policy, "max_position_embeddings", None) or needed
    if needed > longest:
        raise ValueError(
            f"data.max_prompt_length + data.max_response_length = {config.data.max_prompt_length} + "
            f"{config.data.max_response_length} = {needed} tokens, but the model at "
            f"{config.actor_rollout_ref.model.path} has {longest} positions; lower one of the two."
        )
    others = {"critic.model": config.critic.model} if config.needs_critic else {}
    others |= {"reward_model.model": config.reward_model.model} if config.reward_model.enable else {}
    configs = {key: load_hf_config(model, key=key).get_text_config() for key, model in others.items()}
    check_sequence_length(policy, needed, f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}")
    for key, other in configs.items():
        check_sequence_length(other, needed, f"{key}.path={others[key].path}")
        if other.vocab_size != policy.vocab_size:
            raise ValueError(
                f"{key}.path={others[key].path} has {other.vocab_size} token ids, the policy {policy.vocab_size}: it "
                "would read other words than the policy wrote; choose a model of the same vocabulary."
            )
    for key, model in {"actor_rollout_ref.model": config.actor_rollout_ref.model, **others}.items():
        fetch_weights(model, key=key)
    shared = [(config.actor_rollout_ref.actor, "actor_rollout_ref.actor", policy)]
    shared += [(config.critic, "critic", configs["critic.model"])] if config.needs_critic else []
    for part, key, model in shared:
        size = part.ulysses_sequence_parallel_size
        require_shares_of_heads(model, size, f"{key}.ulysses_sequence_parallel_size")


def load_dataset(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, part: str) -> PromptDataset:
    """The prompts of `part`, "train" or "val"."""
    data = config.data
    return PromptDataset(
        list(data.train_files if part == "train" else data.val_files),
        tokenizer,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        truncation=data.truncation,
        max_samples=data.train_max_samples if part == "train" else data.val_max_samples,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )


def training_steps(config: PPOConfig, num_prompts: int) -> int:
    data, trainer = config.data, config.trainer
    sampler = EpochSampler(num_prompts, data.train_batch_size, seed=trainer.seed, shuffle=data.shuffle)
    return trainer.total_training_steps or sampler.num_batches_per_epoch * trainer.total_epochs


def with_training_steps(config: PPOConfig, steps: int) -> PPOConfig:
    """Fills in the number of steps where the configuration leaves it to the run.

    Raises:
        ValueError: the critic's warm-up leaves no step for the actor.
    """
    if 0 < steps <= config.trainer.critic_warmup:
        raise ValueError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} is not less than the {steps} training steps of the "
            "run: the actor would never be trained; lower it, or raise trainer.total_epochs."
        )
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": steps})})


def start_reward_manager(config: PPOConfig) -> RewardManager:
    function, reward = config.custom_reward_function, config.reward
    return RewardManager(
        RewardFunctionSpec(function.path, function.name, function.reward_kwargs),
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
    )


def build_role_worker_mapping(
    config: PPOConfig, own_classes: dict[str, type[Worker]]
) -> dict[str, RayClassWithInitArgs]:
    """The worker class of each active role and its arguments; a role of the user's own gets the whole configuration."""
    seed = config.trainer.seed
    steps, n = config.trainer.total_training_steps, config.actor_rollout_ref.rollout.n
    # The actor's schedule counts the steps that train it: those after the critic's warm-up.
    actor_steps = steps and steps - config.trainer.critic_warmup
    policy = {"config": config.actor_rollout_ref}
    critic = {"config": config.critic, "seed": seed, "rollout_n": n, "total_training_steps": steps}
    built_in: dict[str, tuple[type[Worker], dict[str, Any]]] = {
        Role.Actor: (ActorWorker, policy | {"total_training_steps": actor_steps}),
        Role.Rollout: (RolloutWorker, policy | {"seed": seed}),
        Role.RefPolicy: (ReferenceWorker, dict(policy)),
        Role.Critic: (CriticWorker, critic),
        Role.RewardModel: (RewardModelWorker, {"config": config.reward_model}),
    }
    mapping = {}
    for role in config.active_roles:
        worker_class, arguments = built_in.get(role, (Worker, {"config": config}))
        if role in built_in and role != Role.Rollout:
            arguments["shares_device"] = config.role_mapping[role] == config.role_mapping[Role.Rollout]
        mapping[role] = RayClassWithInitArgs(own_classes.get(role, worker_class), **arguments)
    return mapping


def import_worker_class(role: str, path: str) -> type[Worker]:
    """The class at `package.module.Class`; raises ValueError if it cannot be imported or is not a Worker."""
    module_name, _, class_name = path.rpartition(".")
    try:
        worker_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"worker_classes.{role}={path} cannot be imported ({error}): give package.module.Class, with the package "
            "on PYTHONPATH."
        ) from error
    if not (isinstance(worker_class, type) and issubclass(worker_class, Worker)):
        raise ValueError(
            f"worker_classes.{role}={path} is not a Worker: subclass verl_like.single_controller.worker.Worker."
        )
    return worker_class


def max_colocate_count(config: PPOConfig) -> int:
    """The most worker groups on one pool: training roles share a process, the rollout engine has its own."""
    pools = [pool for pool, _ in process_groups({role: config.role_mapping[role] for role in config.active_roles})]
    return max(pools.count(pool) for pool in pools)


def build_resource_pools(config: PPOConfig) -> ResourcePoolManager:
    pools = ResourcePoolManager(
        {name: list(nodes) for name, nodes in config.resource_pool_spec.items()},
        {role: config.role_mapping[role] for role in config.active_roles},
        use_gpu=config.trainer.device == "cuda",
        max_colocate_count=max_colocate_count(config),
    )
    pools.create_resource_pool()
    return pools
