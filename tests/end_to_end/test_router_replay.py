"""Router replay in a run: a tiny mixture of experts learns with it, and a model without experts is
refused before the run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics_of, mixture_settings, tiny_run_settings
from test_local_step import local_trainer
from tiny_experts import write_experts

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.choice_of_replay import with_router_replay
from verl_like.trainer.ppo.inputs import check_engine_reads, check_routers
from verl_like.workers.models.routed_experts import Routing
from verl_like.workers.models.router_replay import attach_replay
from verl_like.workers.rollout import ENGINES
from verl_like.workers.rollout.hf_engine import HfEngine
from verl_like.workers.rollout.request import NamedCompletion

MODE = "actor_rollout_ref.actor.router_replay.mode"
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
"""With one optimizer step a batch."""


@pytest.fixture
def experts(tmp_path: Path, tiny_llama: Callable) -> list[str]:
    return [*GRPO, *mixture_settings(tmp_path / "experts", tiny_llama)]


class RecordingEngine(HfEngine):
    """Transformers, which is asked once more for the routing of each response that has ended."""

    can_record_routing = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shape = attach_replay(self.model)

    def _step(self) -> list[NamedCompletion]:
        ended = []
        for name, completion in super()._step():
            tokens = [*self._in_flight[name].prompt_ids, *completion.token_ids.tolist()]
            routing = Routing(None)
            self.model.base_model(torch.tensor([tokens]), **routing.arguments)
            ids = routing.own_selection(self.shape.dtype)
            ids[-1] = -1
            ended.append((name, replace(completion, routed_experts=ids.numpy())))
        return ended


def columns_of_calls(trainer: Any, calls: dict[str, list[set[str]]]) -> None:
    """Keeps the columns of the batches that methods of workers are given from now on."""
    for role, group in trainer.groups.items():
        for name in ("compute_log_prob", "compute_ref_log_prob", "update_actor"):
            (worker,) = group.workers
            method = getattr(worker, name, None)
            if method is None:
                continue

            def keep(data: Any, *arguments: Any, method: Any = method, key: str = f"{role}.{name}"):
                calls.setdefault(key, []).append(set(data.tensors()))
                return method(data, *arguments)

            setattr(worker, name, keep)


@pytest.mark.parametrize("mode_of_reference", ["disabled", "R3"])
def test_the_engines_routing_goes_to_those_who_replay_it_and_to_no_one_else(
    tmp_path: Path,
    tiny_llama: Callable,
    experts: list[str],
    mode_of_reference: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ENGINES, "entries", ENGINES.entries | {"recording": RecordingEngine})
    calls: dict[str, list[set[str]]] = {}
    settings = [
        *experts,
        "actor_rollout_ref.rollout.name=recording",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"{MODE}=R3",
        f"actor_rollout_ref.ref.router_replay.mode={mode_of_reference}",
        # Log-probabilities are computed before the update.
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    with local_trainer(tmp_path / "run", tiny_llama, *settings) as trainer:
        columns_of_calls(trainer, calls)
        trainer.fit()
    assert len(calls) == 3
    for method, batches in calls.items():
        replays = method.startswith("actor.") or mode_of_reference == "R3"
        assert [("routed_experts" in columns) for columns in batches] == [replays] * 2, method
    last = metrics_of(tmp_path / "run")[-1]
    assert last["router_replay/routers_differ"] == last["router_replay/tokens_differ"] == 0
    assert last["router_replay/log_probs_diff_with"] < 1e-5
    assert last["rollout/num_unrecorded_tokens"] == 0


def test_a_run_records_routing_before_the_update_and_replays_it_there(
    tmp_path: Path, tiny_llama: Callable, experts: list[str]
):
    calls: dict[str, list[set[str]]] = {}
    with local_trainer(tmp_path / "run", tiny_llama, *experts, f"{MODE}=R2") as trainer:
        columns_of_calls(trainer, calls)
        trainer.fit()
    assert len(calls["actor.update_actor"]) == 2
    for columns in calls["actor.update_actor"]:
        assert "routed_experts" in columns
    last = metrics_of(tmp_path / "run")[-1]
    assert last["step"] == 2 and last["actor/grad_norm"] > 0
    assert abs(last["actor/ppo_kl"]) < 1e-5, "one step, with the routing of before"


def test_the_engines_routing_is_replayed_unless_something_is_in_the_way(
    tmp_path: Path, tiny_llama: Callable, experts: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ENGINES, "entries", ENGINES.entries | {"silent": HfEngine})

    def choice(*further: str, of: list[str] = experts) -> tuple[str | None, list[str]]:
        settings = [*tiny_run_settings(tmp_path, tiny_llama, engine="vllm"), *of, *further]
        chosen, notes = with_router_replay(load_ppo_config(settings))
        return chosen.actor_rollout_ref.actor.router_replay.mode, notes

    assert choice() == ("R3", ["Router replay: R3, the trainer uses the routing of vLLM"])
    assert choice("actor_rollout_ref.ref.router_replay.mode=R3")[0] == "R3"
    assert choice(f"{MODE}=R2") == ("R2", [])
    assert choice(f"{MODE}=disabled") == ("disabled", [])
    assert choice(of=GRPO) == ("disabled", [])  # a model without experts
    obstacles = {
        "actor_rollout_ref.rollout.name=hf": "rollout.name=hf does not record it",
        "actor_rollout_ref.model.use_torch_compile=true": "compiled layers do not see",
        "worker_classes.actor=verl_like.workers.actor.ActorWorker": "worker_classes has actor",
    }
    for setting, why in obstacles.items():
        mode, [note] = choice(setting)
        assert mode == "disabled", setting
        assert note.startswith("Router replay: disabled, because ") and why in note
    mode, [note] = choice("actor_rollout_ref.rollout.name=silent")
    assert mode == "disabled" and "rollout.name=silent does not record it" in note
    # On a GPU vLLM itself returns the routing, of engines of one process.
    on_gpu = "trainer.device=cuda"
    assert choice(on_gpu)[0] == "R3"
    mode, [note] = choice(on_gpu, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert mode == "disabled" and "to the first process of an engine alone" in note
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    mode, [note] = choice(on_gpu)
    assert mode == "disabled" and "only vLLM's Model Runner V2 returns it" in note
    with pytest.raises(ValueError, match=r"recorded only with .*router_replay\.mode=R3"):
        choice("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.ref.router_replay.mode=R3")


def test_replay_of_an_engine_that_does_not_record_is_refused_before_the_run(
    tmp_path: Path, tiny_llama: Callable, experts: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ENGINES, "entries", ENGINES.entries | {"silent": HfEngine})
    settings = [*tiny_run_settings(tmp_path, tiny_llama, engine="silent"), *experts, f"{MODE}=R3"]
    with pytest.raises(ValueError, match=r"rollout.name=silent does not record it; set mode=R2"):
        check_routers(load_ppo_config(settings))
    settings += ["actor_rollout_ref.rollout.name=vllm", "trainer.device=cuda"]
    check_routers(load_ppo_config(settings))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match=r"only vLLM's Model Runner V2 returns it; set mode=R2"):
        check_routers(load_ppo_config(settings))


def test_replay_for_a_model_without_experts_is_refused_before_the_run(
    tmp_path: Path, tiny_llama: Callable
):
    settings = tiny_run_settings(tmp_path, tiny_llama)
    check_routers(load_ppo_config(settings))
    with pytest.raises(
        ValueError, match=r"mode=R2 with actor_rollout_ref.model.path=.* has no experts"
    ):
        check_routers(load_ppo_config([*settings, f"{MODE}=R2"]))
    actor = "actor_rollout_ref.actor"
    for setting, off in (("freeze_router=true", "false"), ("router_aux_loss_coef=0.1", "0")):
        message = f"{actor}.{setting} with .* has no experts, .*; set {actor}.*={off}$"
        with pytest.raises(ValueError, match=message):
            check_routers(load_ppo_config([*settings, f"{actor}.{setting}"]))


def test_an_adapter_of_latent_attention_is_refused_with_vllm(tmp_path: Path, tiny_llama: Callable):
    model = write_experts(tmp_path / "model", "deepseek_v3")
    settings = tiny_run_settings(tmp_path, tiny_llama)
    settings += [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.lora_rank=4"]
    check_engine_reads(load_ppo_config(settings))
    with pytest.raises(ValueError, match=r"lora_rank=4 with .*=vllm: .* \(kv_lora_rank=8\), whose"):
        check_engine_reads(load_ppo_config([*settings, "actor_rollout_ref.rollout.name=vllm"]))
