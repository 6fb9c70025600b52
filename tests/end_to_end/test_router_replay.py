"""Router replay in a run: a tiny mixture of experts learns with it, and a model without experts is
refused before the run."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import metrics_of, tiny_run_settings
from test_local_step import local_trainer
from tiny_experts import CONFIGS
from transformers import AutoModelForCausalLM

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.inputs import check_router_replay

MODE = "actor_rollout_ref.actor.router_replay.mode"
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
"""With one optimizer step a batch."""


def test_a_run_records_routing_before_the_update_and_replays_it_there(
    tmp_path: Path, tiny_llama: Callable
):
    tokens_of, llama = tiny_llama()
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.vocab_size = llama.config.vocab_size
    experts = tmp_path / "experts"
    AutoModelForCausalLM.from_config(config).save_pretrained(experts)
    columns_of_updates: list[set[str]] = []
    model = "actor_rollout_ref.model"
    settings = [
        *GRPO,
        f"{MODE}=R2",
        f"{model}.path={experts}",
        f"{model}.tokenizer_path={tokens_of}",
    ]
    with local_trainer(tmp_path / "run", tiny_llama, *settings) as trainer:
        (worker,) = trainer.groups["actor"].workers
        update = worker.update_actor

        def keep(data: Any, *arguments: Any) -> Any:
            columns_of_updates.append(set(data.tensors()))
            return update(data, *arguments)

        worker.update_actor = keep
        trainer.fit()
    assert len(columns_of_updates) == 2
    assert all("routed_experts" in columns for columns in columns_of_updates)
    last = metrics_of(tmp_path / "run")[-1]
    assert last["step"] == 2 and last["actor/grad_norm"] > 0
    assert abs(last["actor/ppo_kl"]) < 1e-5, "one step, with the routing of before"


def test_replay_for_a_model_without_experts_is_refused_before_the_run(
    tmp_path: Path, tiny_llama: Callable
):
    settings = tiny_run_settings(tmp_path, tiny_llama)
    check_router_replay(load_ppo_config(settings))
    with pytest.raises(
        ValueError, match=r"mode=R2 with actor_rollout_ref.model.path=.* has no experts"
    ):
        check_router_replay(load_ppo_config([*settings, f"{MODE}=R2"]))
