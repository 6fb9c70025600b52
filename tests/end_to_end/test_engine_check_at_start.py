"""A run whose engine computes another model than the actor ends before its first step; one that
passes is as it was."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import APART, metrics_of, mixture_settings, run_apart, tiny_run_settings
from test_local_step import local_trainer, run_locally

from verl_like.trainer.ppo import compared_prompts, engine_check
from verl_like.trainer.ppo.engine_check import EngineMismatch
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer

OTHER_NORMS = """
from verl_like.workers.rollout_worker import RolloutWorker


class OtherNorms(RolloutWorker):
    # Its engine has the actor's weights and another epsilon in the norms.
    def __init__(self, config, seed):
        model = config.model.model_copy(update={"override_config": {"rms_norm_eps": 0.5}})
        super().__init__(config.model_copy(update={"model": model}), seed)
"""
UNKNOWN = """
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.workers.rollout_worker import RolloutWorker


class Unknown(RolloutWorker):
    # As if it were not known how its engine keeps a weight.
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def unknown_parameters(self):
        return ("model.norm.weight", "lm_head.weight")


class Lost(Unknown):
    # The third version of a weight without a fingerprint is lost.
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, exported, version, checks_first=True):
        lm_head = self.rollout.model.lm_head.weight
        before = lm_head.detach().clone()
        fingerprint = super().load_weights(exported, version, checks_first)
        if version == 2:
            lm_head.data.copy_(-before)
        return fingerprint
"""
REFUSAL = (
    r"rollout replica 0{} does not compute the actor's model, though its weights are the actor's"
)


@pytest.fixture
def other_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The setting of an engine that computes another model."""
    (tmp_path / "other_norms.py").write_text(OTHER_NORMS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    return "worker_classes.rollout=other_norms.OtherNorms"


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of workers whose engine has weights without a fingerprint."""
    (tmp_path / "unknown_weights.py").write_text(UNKNOWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "worker_classes.rollout=unknown_weights"


def test_log_probs_show_after_each_update_that_weights_without_a_fingerprint_arrived(
    tmp_path: Path,
    tiny_llama: Callable,
    unknown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    compared = []
    compare = RayPPOTrainer.compare_engines

    def count(trainer: RayPPOTrainer) -> None:
        compare(trainer)
        compared.append(trainer)

    monkeypatch.setattr(RayPPOTrainer, "compare_engines", count)
    with local_trainer(tmp_path / "run", tiny_llama, f"{unknown}.Unknown") as trainer:
        trainer.fit()
    assert len(compared) == 1 + 2
    said = capsys.readouterr().out
    assert "Arrival shown by numbers: it is not known how vLLM keeps model.norm.weight" in said
    [note] = trainer.recorder.notes
    assert note in said
    assert "Arrival shown by numbers" in (trainer.recorder.run_dir / "report.html").read_text()


def test_for_a_mixture_the_prompts_are_compared_that_reach_all_experts_and_others_are_named(
    tmp_path: Path, tiny_llama: Callable, unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    draw = engine_check.draw

    def keep(rollout: Any, dataset: Any, numbers: Any = None) -> Any:
        asked.append(list(numbers))
        return draw(rollout, dataset, numbers)

    monkeypatch.setattr(engine_check, "draw", keep)
    monkeypatch.setattr(compared_prompts, "NUM_PROMPTS", 1)
    settings = [f"{unknown}.Unknown", *mixture_settings(tmp_path / "mixture", tiny_llama)]
    with local_trainer(tmp_path / "all", tiny_llama, *settings) as trainer:
        trainer.fit()
    candidates, *compared = asked
    assert candidates == list(range(8))
    assert compared[0][0] == 0 and 1 < len(compared[0]) <= 8
    assert compared == [compared[0]] * 3
    assert trainer.recorder.notes[1].endswith("they depend on each expert.")
    monkeypatch.setattr(compared_prompts, "NUM_CANDIDATES", 1)
    with local_trainer(tmp_path / "one", tiny_llama, *settings) as trainer:
        assert trainer.compared_prompts == [0]
    assert re.search(r"nothing shows .* arrive: \d.* of router \d", trainer.recorder.notes[1])


def test_a_run_ends_in_the_step_in_which_such_a_weight_is_lost(
    tmp_path: Path, tiny_llama: Callable, unknown: str
) -> None:
    with (
        local_trainer(tmp_path / "run", tiny_llama, f"{unknown}.Lost", steps=4) as trainer,
        pytest.raises(EngineMismatch, match=REFUSAL.format("")),
    ):
        trainer.fit()
    assert len(metrics_of(tmp_path / "run")) < 3


def test_a_run_whose_engine_computes_another_model_is_refused(
    tmp_path: Path, tiny_llama: Callable, other_norms: str
) -> None:
    with (
        pytest.raises(EngineMismatch, match=REFUSAL.format("")),
        local_trainer(tmp_path, tiny_llama, other_norms),
    ):
        pass


def test_the_comparison_changes_no_number_of_the_run(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_locally(tmp_path / "compared", tiny_llama)
    monkeypatch.setattr(RayPPOTrainer, "compare_engines", lambda trainer: None)
    run_locally(tmp_path / "not_compared", tiny_llama)
    for compared, other in zip(
        metrics_of(tmp_path / "compared"), metrics_of(tmp_path / "not_compared"), strict=True
    ):
        assert compared.keys() == other.keys()
        different = {name for name in compared if compared[name] != other[name]} - {
            "reward/early_ratio"
        }
        assert {
            name
            for name in different
            if not name.startswith(("timing_s/", "perf/")) and "/perf/" not in name
        } == set()


@pytest.mark.proof
@pytest.mark.ray
def test_a_maker_whose_engine_computes_another_model_ends_a_detached_run(
    tmp_path: Path, tiny_llama: Callable, other_norms: str, capfd: pytest.CaptureFixture
) -> None:
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *APART,
        "detached.num_makers=2",
        other_norms,
    ]
    settings += ["algorithm.rollout_correction.bypass_mode=true"]
    assert run_apart(settings) == 1
    assert re.search(REFUSAL.format(" of maker_[01]"), capfd.readouterr().err)
    assert not [row for row in metrics_of(tmp_path) if "actor/loss" in row]
