"""The checkpoint of the step with the best validation is kept."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import metrics_of
from test_local_step import local_trainer, run_locally

from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer
from verl_like.trainer.run.run_recorder import UnknownMetric
from verl_like.trainer.state import checkpoint

METRIC = "val-core/exact_match/acc/mean@1"
BEST = [
    f"trainer.best_ckpt_metric={METRIC}",
    "algorithm.adv_estimator=grpo",
    "trainer.max_ckpt_to_keep=1",
]


def with_accuracies(trainer: RayPPOTrainer, accuracies: list[float | None]) -> None:
    """Validations report these numbers, beginning before the first step; None is one that has no
    such number."""

    def validate() -> dict[str, float]:
        accuracy = accuracies[trainer.global_step]
        return {"val-aux/num_errors": 0.0} | ({} if accuracy is None else {METRIC: accuracy})

    trainer.validate = validate


def steps_of(folder: Path) -> list[int]:
    return checkpoint.steps(folder / "runs/latest")


@pytest.mark.parametrize(
    ("accuracies", "settings", "steps"),
    [
        # Before the first step is no step
        ([0.9, 0.2, 0.7, 0.7, 0.1, 0.3], ["trainer.save_freq=-1"], [2, 5]),
        ([0.0, 0.2, 0.1, 0.1, 0.1, 0.3], ["trainer.save_freq=-1"], [5]),
        (
            [0.0, -0.5, -0.7, -0.2, -0.9, -0.3],
            ["trainer.save_freq=2", "trainer.max_ckpt_to_keep=2"],
            [3, 4, 5],
        ),
        ([0.0, 0.3, None, 0.2, float("nan"), 0.1], ["trainer.save_freq=1"], [1, 5]),
    ],
)
def test_the_checkpoint_of_the_highest_validation_is_kept_beside_the_newest(
    accuracies: list[float | None],
    settings: list[str],
    steps: list[int],
    tmp_path: Path,
    tiny_llama: Callable,
):
    with local_trainer(tmp_path, tiny_llama, *BEST, *settings, steps=5) as trainer:
        with_accuracies(trainer, accuracies)
        trainer.fit()
    assert steps_of(tmp_path) == steps


def test_the_best_checkpoint_is_known_after_a_resume_and_forgotten_with_another_metric(
    tmp_path: Path, tiny_llama: Callable
):
    def run(accuracies: list[float | None], *settings: str) -> None:
        with local_trainer(
            tmp_path, tiny_llama, *BEST, "trainer.save_freq=3", *settings, steps=6
        ) as trainer:
            with_accuracies(trainer, accuracies)
            trainer.fit()

    with pytest.raises(IndexError):  # ends it in the fourth step
        run([0.0, 0.2, 0.7, 0.1])
    assert steps_of(tmp_path) == [2, 3]
    with pytest.raises(IndexError):
        run([0.0, 0.0, 0.0, 0.0, 0.6])
    assert steps_of(tmp_path) == [2, 3]
    run([0.0, 0.0, 0.0, 0.0, 0.6, 0.65, 0.2], "trainer.best_ckpt_metric=val-aux/num_errors")
    assert steps_of(tmp_path) == [4, 6]


def test_a_run_keeps_the_step_whose_own_validation_was_best_and_says_which(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture[str]
):
    metric = "val-aux/exact_match/reward/mean@1"
    run_locally(tmp_path, tiny_llama, *BEST, f"trainer.best_ckpt_metric={metric}", steps=4)
    values = {row["step"]: row[metric] for row in metrics_of(tmp_path) if row["step"]}
    best = max(values, key=lambda step: (values[step], -step))
    assert steps_of(tmp_path) == sorted({best, 4})
    assert re.search(rf"global_step_{best} +best {metric}\n", capsys.readouterr().out)


def test_a_metric_that_the_first_validation_does_not_report_is_refused_with_those_that_it_does(
    tmp_path: Path, tiny_llama: Callable
):
    settings = ["trainer.best_ckpt_metric=val-core/exact_match/acc", "algorithm.adv_estimator=grpo"]
    with local_trainer(tmp_path, tiny_llama, *settings) as trainer:
        with pytest.raises(
            UnknownMetric, match=rf"exact_match/acc is not .* one of these: .*{METRIC}\.$"
        ):
            trainer.fit()
        assert trainer.global_step == 0
