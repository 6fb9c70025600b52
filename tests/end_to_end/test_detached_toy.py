"""Detached training learns as well as synchronous training, in every topology: proofs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import metrics_of
from test_toy_job import ACCURACY, GRPO, ROOT, train

from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.run_detached import run_detached
from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.run import worker_template

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.proof, pytest.mark.timeout(1200)]
WANTED = 0.95
BYPASS = ["algorithm.rollout_correction.bypass_mode=true"]
WEIGHTED = [
    "algorithm.rollout_correction.bypass_mode=false",
    "algorithm.rollout_correction.rollout_is=token",
]


def first_step_with_accuracy(rows: list[dict]) -> int | None:
    return next((row["step"] for row in rows if row.get(ACCURACY, 0.0) >= WANTED), None)


@pytest.fixture(scope="module")
def synchronous_steps(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Training steps after which the synchronous run has the accuracy."""
    rows = train(
        tmp_path_factory.mktemp("synchronous"), 1, 24, "trainer.test_freq=2", *BYPASS, example=GRPO
    )
    steps = first_step_with_accuracy(rows)
    assert steps is not None
    return steps


@pytest.mark.parametrize(
    ("makers", "trainers", "staleness", "correction"),
    [
        *(
            (*sides, staleness, BYPASS)
            for sides in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2))
            for staleness in (0, 1)
        ),
        (1, 1, 1, WEIGHTED),
    ],
)
def test_makers_and_trainers_reach_the_accuracy_with_at_most_half_as_many_samples_more(
    tmp_path: Path,
    synchronous_steps: int,
    makers: int,
    trainers: int,
    staleness: int,
    correction: list[str],
    record_property: Callable[[str, object], None],
):
    world, steps = ROOT / ".toy_world", synchronous_steps * 3 // 2
    settings = [
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={world}/model",
        f"trainer.default_local_dir={tmp_path}/runs",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=1",
        "trainer.seed=1",
        f"detached.num_makers={makers}",
        f"detached.num_trainers={trainers}",
        f"trainer.max_staleness={staleness}",
        *correction,
    ]
    config = load_config(
        DetachedConfig,
        broken_detached_rules,
        settings,
        "toy",
        str(ROOT / "examples/detached/config"),
    )
    assert run_detached(config, worker_template.start(WORKERS)) == 0
    rows = metrics_of(tmp_path)
    trained = [row for row in rows if "actor/loss" in row]
    assert len(trained) == steps
    assert max(row["training/staleness/max"] for row in trained) <= staleness
    counts = {
        name: trained[-1][f"detached/{name}"]
        for name in ("trained", "training", "in_buffer", "in_flight")
    }
    assert counts == {"trained": 32 * steps, "training": 0, "in_buffer": 0, "in_flight": 0}
    reached = first_step_with_accuracy(rows)
    record_property(
        "result",
        f"accuracy {WANTED} after step {reached}, synchronous after step {synchronous_steps}",
    )
    assert reached is not None
