"""What an adapter of the actor demands, and a language-model loss beside the policy's (PPO-ptx)."""

from collections.abc import Iterator

from verl_like.trainer.config.roles import Role
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.config.supervised import RECORDS_ROUTING, TRAINS_ROUTERS

VLLM = ("vllm", "vllm_async")
"""The names of the engines of vLLM."""


def ptx_rows_have_a_weight(config: PPOConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    files = list(config.data.ptx_files)
    if bool(actor.ptx_coef) != bool(files):
        yield (
            f"actor_rollout_ref.actor.ptx_coef={actor.ptx_coef} weighs the loss on "
            f"data.ptx_files={files}: give both or neither"
        )


def replayed_routing_is_recorded(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    mode = policy.actor.router_replay.chosen
    key = f"actor_rollout_ref.actor.router_replay.mode={mode}"
    reference = f"actor_rollout_ref.ref.router_replay.mode={policy.ref.router_replay.mode}"
    is_chosen_later = policy.actor.router_replay.mode is None
    if policy.ref.router_replay.mode == "R3" and mode != "R3" and not is_chosen_later:
        yield (
            f"{reference} replays the routing of the rollout engine, which is recorded only with "
            "actor_rollout_ref.actor.router_replay.mode=R3; set that, or disabled for the reference"
        )
    if mode == "disabled":
        return
    if policy.model.use_torch_compile:
        yield (
            f"{key} replaces what routers select while their code runs, which compiled layers do "
            "not see; set actor_rollout_ref.model.use_torch_compile=false, or mode=disabled"
        )
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        yield (
            f"{key} replays the routing of the pass that computes old log-probabilities, which "
            "algorithm.rollout_correction.bypass_mode=true leaves out; set bypass_mode=false, or "
            "mode=disabled"
        )
    if mode == "R3":
        yield from _routing_is_captured(config, key)


def the_engines_experts_are_distributed_on_gpus(config: PPOConfig) -> Iterator[str]:
    size = config.actor_rollout_ref.rollout.expert_parallel_size
    if size > 1 and config.trainer.device == "cpu":
        yield (
            f"actor_rollout_ref.rollout.expert_parallel_size={size} with trainer.device=cpu: "
            "vLLM's kernel of experts on a CPU (cpu_fused_moe) ends with a segmentation fault in "
            "a process that does not have all experts; set it to 1"
        )


def balanced_routers_are_trained(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    actor = policy.actor
    key = f"actor_rollout_ref.actor.router_aux_loss_coef={actor.router_aux_loss_coef}"
    if actor.freeze_router and actor.ema_decay is not None:
        yield (
            "actor_rollout_ref.actor.freeze_router=true trains no router, and "
            f"actor_rollout_ref.actor.ema_decay={actor.ema_decay} averages the whole model: set "
            "ema_decay=null, or freeze_router=false"
        )
    if not actor.router_aux_loss_coef:
        return
    if actor.freeze_router:
        yield (
            f"{key} balances the experts by training routers, and "
            "actor_rollout_ref.actor.freeze_router=true leaves them as they are: set one of the two"
        )
    if policy.model.lora_rank:
        yield (
            f"{key} {TRAINS_ROUTERS}; set actor_rollout_ref.model.lora_rank=0, or the coefficient "
            "to 0"
        )
    if policy.model.use_torch_compile:
        yield (
            f"{key} {RECORDS_ROUTING}; set actor_rollout_ref.model.use_torch_compile=false, or the "
            "coefficient to 0"
        )


def _routing_is_captured(config: PPOConfig, key: str) -> Iterator[str]:
    name = config.actor_rollout_ref.rollout.name
    if name == "hf":
        yield (
            f"{key} replays the routing of the rollout engine, and "
            "actor_rollout_ref.rollout.name=hf does not record it; set name=vllm, or mode=R2"
        )
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if name in VLLM and config.trainer.device == "cuda" and size > 1:
        yield (
            f"{key} with trainer.device=cuda: vLLM returns the routing to the first process of an "
            f"engine alone, and actor_rollout_ref.rollout.tensor_model_parallel_size={size} has "
            "each process of it schedule for itself; set that to 1, or mode=R2"
        )


def a_reference_in_the_actor_computes_as_the_actor(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    dtype = policy.actor.fsdp_config.dtype
    own = policy.ref.fsdp_config.dtype
    if config.plan.role_of_reference == Role.Actor and own != dtype:
        yield (
            f"actor_rollout_ref.ref.fsdp_config.dtype={own}: with "
            f"model.lora_rank={policy.model.lora_rank} the reference is the actor without its "
            f"adapter, which computes in {dtype}; set it to that"
        )
