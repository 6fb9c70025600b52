"""The worker class of each role and the pools that they run on, as PPO's configuration says."""

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.ray.worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import OnCall, WorkerGroup
from verl_like.trainer.config.roles import OWN_PROCESS, Role, process_groups, reward_model_key
from verl_like.trainer.config.schema import PPOConfig
from verl_like.workers.actor import ActorWorker
from verl_like.workers.agent_worker import AgentWorker, UnscoredAgentWorker
from verl_like.workers.agents.hosts import Description
from verl_like.workers.agents.router import OnEpisodes, connect_agents
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.critic import CriticWorker
from verl_like.workers.reference import ReferenceWorker, ReplayingReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker
from verl_like.workers.rollout_worker import RolloutWorker
from verl_like.workers.teacher import TeacherWorker

PlacedGroup = tuple[str, list[str], RayWorkerGroup]
"""A group of processes that was started: its pool, its roles, and the group itself."""


def build_role_worker_mapping(
    config: PPOConfig, own_classes: dict[str, type[Worker]], agents: Description | None = None
) -> dict[str, RayClassWithInitArgs]:
    """Returns the worker class of each active role, with the arguments of its constructor.

    `own_classes` has the user's classes by role, which take the places of the built-in ones. The
    class for the reward model serves all reward models. A custom role, which has no built-in class,
    gets the whole configuration. `agents` says which tools the agents have, if there are any.
    """
    seed = config.trainer.seed
    steps = config.trainer.total_training_steps
    policy = {"config": config.actor_rollout_ref}
    # The actor's schedule counts the steps that train it, which are those after the critic's
    # warm-up.
    actor_steps = steps and steps - config.trainer.critic_warmup
    actor = policy | {"total_training_steps": actor_steps}
    if "sum_pi_squared" in config.plan.estimator_needs:
        actor["with_sum_pi_squared"] = True
    critic = {
        "config": config.critic,
        "seed": seed,
        "rollout_n": config.actor_rollout_ref.rollout.n,
        "total_training_steps": steps,
        "weight_transport": transport_to_copies(config),
    }
    replays = config.actor_rollout_ref.ref.router_replay.mode == "R3"
    reference_class = ReplayingReferenceWorker if replays else ReferenceWorker
    built_in: dict[str, tuple[type[Worker], dict[str, Any]]] = {
        Role.Actor: (ActorWorker, actor),
        Role.Rollout: (RolloutWorker, policy | {"seed": seed}),
        Role.RefPolicy: (reference_class, dict(policy)),
        Role.Teacher: (TeacherWorker, dict(policy)),
        Role.Critic: (CriticWorker, critic),
    }
    if agents:
        agent_class = AgentWorker if agents.has_reward else UnscoredAgentWorker
        built_in[Role.Agent] = (agent_class, agent_arguments(config, agents))
    reward_model_class = own_classes.get(Role.RewardModel, RewardModelWorker)
    for role, model in config.plan.reward_models_by_role.items():
        arguments: dict[str, Any] = {"config": model}
        if role != Role.RewardModel:
            arguments["model_key"] = reward_model_key(role)
        built_in[role] = (reward_model_class, arguments)
    mapping = {}
    pool_of_rollout = config.role_mapping.get(Role.Rollout)
    for role in config.plan.active_roles:
        worker_class, arguments = built_in.get(role, (Worker, {"config": config}))
        worker_class = own_classes.get(role, worker_class)
        if role in built_in and role not in OWN_PROCESS:
            pool = config.role_mapping[role]
            arguments["shares_device"] = pool == pool_of_rollout
        built = RayClassWithInitArgs(worker_class, **arguments)
        built.plugins = config.plugins
        mapping[role] = built
    return mapping


def agent_arguments(config: PPOConfig, agents: Description) -> dict[str, Any]:
    """Returns the arguments of an agent's worker."""
    compares_samples = "index" in config.plan.estimator_needs
    rules = {
        "min_samples": 2 if compares_samples else 1,
        "num_of_step": config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
        "on_error": config.reward.on_error,
    }
    return {
        "config": config.agent,
        "policy": config.actor_rollout_ref,
        "rules": rules,
        "template_kwargs": config.data.apply_chat_template_kwargs,
        "agents": agents,
    }


def transport_to_copies(config: PPOConfig) -> str:
    """Returns how weights reach the copies of a detached maker. It is the transport to the engines,
    unless that sends straight into the engines, which copies cannot receive."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.sends_directly:
        return "object_store"
    return rollout.weight_transport


def import_worker_class(role: str, path: str) -> type[Worker]:
    """Imports the class at `package.module.Class` for a role. Raises ValueError if it cannot be
    imported, is not a Worker, or lacks the method `annotate`, which a custom role needs."""
    module_and_class = ":".join(path.rsplit(".", 1))
    try:
        worker_class = pkgutil.resolve_name(module_and_class)
    except (Exception, SystemExit) as error:  # the module may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"worker_classes.{role}={path} cannot be imported ({problem}): give "
            "package.module.Class, with the package on PYTHONPATH."
        ) from error
    if not (isinstance(worker_class, type) and issubclass(worker_class, Worker)):
        raise ValueError(
            f"worker_classes.{role}={path} is not a Worker: subclass "
            "verl_like.single_controller.worker.Worker."
        )
    is_custom = role not in set(Role)
    if is_custom and "annotate" not in registered_methods(worker_class):
        raise ValueError(
            f"worker_classes.{role}={path} has no registered method annotate, by which a custom "
            "role adds columns to the batch: add one, or correct the name of the role."
        )
    return worker_class


def build_resource_pools(
    config: PPOConfig, roles: Sequence[str] | None = None
) -> ResourcePoolManager:
    """Returns the pools of the configuration for `roles`, by default all active ones.

    On each device of a pool, the training roles share one process, and the rollout engine has
    another. The pools are divided for the largest number of processes on a device. A pool that only
    agents have takes CPUs alone.
    """
    roles = roles or config.plan.active_roles
    mapping = {role: config.role_mapping[role] for role in roles}
    pool_of_groups = [pool for pool, _roles in process_groups(mapping)]
    max_colocate_count = max(pool_of_groups.count(pool) for pool in pool_of_groups)
    pools_of_others = {pool for role, pool in mapping.items() if role != Role.Agent}
    return ResourcePoolManager(
        config.resource_pool_spec,
        mapping,
        use_gpu=config.trainer.device == "cuda",
        max_colocate_count=max_colocate_count,
        without_gpu=config.resource_pool_spec.keys() - pools_of_others,
    )


def start_groups(
    config: PPOConfig,
    mapping: Mapping[str, RayClassWithInitArgs],
    pools: ResourcePoolManager,
    on_call: OnCall,
    joint_trainer: JointTrainer | None = None,
) -> tuple[dict[str, WorkerGroup], list[PlacedGroup]]:
    """Starts the processes of all roles. Training roles of one pool share their processes. The
    pools are reserved, unless that was done.

    Returns a worker group for each role, and each group of processes. `joint_trainer` says how
    processes of several trainers meet.
    """
    pools.create_resource_pool()
    groups: dict[str, WorkerGroup] = {}
    placement = []
    pool_of_role = {role: config.role_mapping[role] for role in mapping}
    for pool, roles in process_groups(pool_of_role):
        class_of_role = {role: mapping[role] for role in roles}
        worker_class = create_colocated_worker_cls(class_of_role)
        worker_env = None
        if joint_trainer:
            worker_env = joint_trainer.worker_env("+".join(roles))
        processes = RayWorkerGroup(
            pools.get_resource_pool(roles[0]),
            worker_class,
            deadline_s=config.trainer.call_timeout_s,
            on_call=on_call,
            worker_env=worker_env,
        )
        groups |= processes.spawn(roles)
        placement.append((pool, roles, processes))
    return groups, placement


def load_models(
    groups: Mapping[str, WorkerGroup],
    device: str,
    on_episodes: OnEpisodes = lambda prompts, episodes: None,
) -> None:
    """Loads the models of all groups. They load at the same time, except that on a GPU the rollout
    loads after the others. `on_episodes` is told of the episodes of agents.

    vLLM takes its share of the free memory, and asserts that no other process frees memory while it
    measures how much there is.
    """
    last = {Role.Rollout} if device == "cuda" else set()
    pending = [group.init_model.remote() for role, group in groups.items() if role not in last]
    for future in pending:
        future.get()
    for role in last & groups.keys():
        groups[role].init_model.remote().get()
    if agents := groups.get(Role.Agent):
        connect_agents(agents, groups[Role.Rollout], on_episodes)
