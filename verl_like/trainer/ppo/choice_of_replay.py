"""Chooses whether the routing of experts is replayed, where the configuration leaves it open."""

import os

from transformers import PretrainedConfig, PreTrainedModel

from verl_like.trainer.config.actor_rules import VLLM, replayed_routing_is_recorded
from verl_like.trainer.config.roles import POLICY_KEY, Role
from verl_like.trainer.config.schema import PPOConfig
from verl_like.workers.models import pretrained
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.router_replay import require_replay
from verl_like.workers.rollout import get_rollout_engine

MODE = "actor_rollout_ref.actor.router_replay.mode"


def hf_config_of_policy(config: PPOConfig) -> PretrainedConfig:
    """Loads the own configuration of the policy's model."""
    return pretrained.load_hf_config(config.actor_rollout_ref.model, key=POLICY_KEY)


def empty_policy(config: PPOConfig) -> PreTrainedModel:
    """Makes the policy's model on torch's meta device."""
    model = config.actor_rollout_ref.model
    return pretrained.empty_model(model, PolicyModel.auto_class, key=POLICY_KEY)


def with_router_replay(config: PPOConfig) -> tuple[PPOConfig, list[str]]:
    """Fills in `router_replay.mode` of the actor if it is null: R3 for a mixture of experts whose
    routing the rollout engine records, otherwise `disabled`.

    Returns the configuration, and what the start of the run says of the choice, which is nothing
    for a model without experts. Raises ValueError if `ref.router_replay.mode` needs R3 and it is
    not chosen.
    """
    if config.actor_rollout_ref.actor.router_replay.mode is not None:
        return config, []
    hf_config = hf_config_of_policy(config)
    disabled = config.updated({MODE: "disabled"})
    if not has_experts(hf_config):
        _require_rule(disabled)
        return disabled, []
    obstacle = _obstacle(config)
    if obstacle is None:
        chosen = config.updated({MODE: "R3"})
        return chosen, ["Router replay: R3, the trainer uses the routing of vLLM"]
    _require_rule(disabled)
    return disabled, [f"Router replay: disabled, because {obstacle}"]


def has_experts(hf_config: PretrainedConfig) -> bool:
    """Returns True for the configuration of a model of a family with experts."""
    names = hf_config.get_text_config().to_dict()
    return any("experts" in name for name in names)


def _obstacle(config: PPOConfig) -> str | None:
    """Returns why R3 is not chosen for a mixture of experts, or None if it is."""
    own_roles = {Role.Actor, Role.Rollout} & config.worker_classes.keys()
    if own_roles:
        return f"worker_classes has {', '.join(sorted(own_roles))}"
    for problem in replayed_routing_is_recorded(config.updated({MODE: "R3"})):
        return problem
    unrecorded = why_unrecorded(config)
    if unrecorded is not None:
        return unrecorded
    hf = empty_policy(config)
    try:
        require_replay(hf)
    except ValueError as error:
        return str(error)
    return None


def why_unrecorded(config: PPOConfig) -> str | None:
    """Returns why the rollout engine does not record its routing, or None if it can.

    The rule `replayed_routing_is_recorded` sees the configuration alone.
    """
    name = config.actor_rollout_ref.rollout.name
    if not get_rollout_engine(name).can_record_routing:
        return f"actor_rollout_ref.rollout.name={name} does not record it"
    on_gpu = config.trainer.device == "cuda"
    if name in VLLM and on_gpu and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "VLLM_USE_V2_MODEL_RUNNER=0, and only vLLM's Model Runner V2 returns it"
    return None


def _require_rule(config: PPOConfig) -> None:
    """Raises ValueError for what a mode that is chosen rules out."""
    for problem in replayed_routing_is_recorded(config):
        raise ValueError(problem)
