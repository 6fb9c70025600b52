"""Runs that go on with other numbers of ranks and rollout replicas: equal up to rounding, until a
token flips.

`pytest -s -m proof tests/end_to_end/test_resume_on_other_ranks.py` prints the table of
docs/checkpoints.md.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import largest_difference, tiny_run_settings

pytestmark = [pytest.mark.ray, pytest.mark.proof, pytest.mark.timeout(1800)]
STOPS = (10, 20, 40)
"""The step in which each part of a run ends."""
START = 2, 1
"""Ranks that train and replicas that generate: of the run that is not stopped, and of the first
part of the others."""
PLACES = {
    "ranks and replicas": [(1, 2), (4, 3)],
    "replicas": [(2, 2), (2, 3)],
    "ranks": [(1, 1), (4, 1)],
}
"""Those of the parts that follow."""
RECORDER = """
import json
import os
import signal
from pathlib import Path

from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, register_trainer


class RecordingMaker(ExperienceMaker):
    def estimate(self, corrected):
        batch = corrected.batch
        step = batch.meta_info["global_steps"]
        file = Path(self.config.trainer.default_local_dir).with_name(f"tokens_{step}.json")
        file.write_text(json.dumps(batch.batch["responses"].tolist()))
        if step == int(os.environ["LAST_STEP"]):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().estimate(corrected)


@register_trainer
class RecordingTrainer(RayPPOTrainer):
    def build_maker(self):
        return RecordingMaker(**vars(super().build_maker()))
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(str.isdigit, solution_str)) / (1 + len(solution_str))
"""


def train(folder: Path, settings: list[str], last_step: int, ranks: int, replicas: int) -> None:
    """Trains by the command, from where the run in the folder stopped, until SIGTERM in a step."""
    settings = [
        *settings,
        f"trainer.default_local_dir={folder}/runs",
        f"trainer.n_gpus_per_node={ranks}",
    ]
    settings = [*settings, f"+resource_pool_spec.rollout_pool=[{replicas}]"]
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "verl_like.trainer.main_ppo", *settings]
    environment = os.environ | {"LAST_STEP": str(last_step)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == (0 if last_step == STOPS[-1] else 130), run.stderr


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable
) -> Iterator[tuple[str, list[str], Path]]:
    """An engine; settings of a run with it; the folder of a `whole` one, and of one that was
    `stopped`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recorder_of_tokens.py").write_text(RECORDER)
    settings = [
        *tiny_run_settings(folder, tiny_llama, engine=request.param),
        "plugins=recorder_of_tokens",
    ]
    (folder / "reward.py").write_text(REWARD)
    settings += [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
    ]
    optim = ("lr=3e-3", "lr_warmup_steps=15", "lr_scheduler_type=linear")
    settings += [f"actor_rollout_ref.actor.optim.{key}" for key in optim]
    settings += [
        "actor_rollout_ref.rollout.n=4",
        "data.max_response_length=8",
        "role_mapping.rollout=rollout_pool",
    ]
    settings += [
        f"trainer.total_training_steps={STOPS[-1]}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        train(folder / "whole", settings, STOPS[-1], *START)
        train(folder / "stopped", settings, STOPS[0], *START)
        yield request.param, settings, folder


def first_flip(folder: Path, other: Path) -> tuple[int, int, int] | None:
    """Step, row of its batch and position in the response of the first token that is another
    one."""
    for step in range(1, STOPS[-1] + 1):
        rows, others = (
            json.loads((each / f"tokens_{step}.json").read_text()) for each in (folder, other)
        )
        for number, (row, other_row) in enumerate(zip(rows, others, strict=True)):
            if row != other_row:
                return (
                    step,
                    number,
                    [a == b for a, b in zip(row, other_row, strict=True)].index(False),
                )
    return None


@pytest.mark.parametrize("places", PLACES)
def test_a_run_goes_on_on_other_ranks_with_equal_numbers_until_a_token_flips(
    places: str,
    runs: tuple[str, list[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
):
    engine, settings, folder = runs
    shutil.copytree(folder / "stopped", parts := tmp_path / "parts", symlinks=True)
    for last_step, (ranks, replicas) in zip(STOPS[1:], PLACES[places], strict=True):
        train(parts, settings, last_step, ranks, replicas)
    assert len(list((parts / "runs").glob("2*"))) == 1
    flip = first_flip(parts, folder / "whole")
    num_equal = flip[0] - 1 if flip else STOPS[-1]
    difference, metric = largest_difference(parts, folder / "whole", num_equal)
    assert difference < 1e-5 and num_equal >= STOPS[1], (difference, metric, flip)
    ranks, replicas = (
        " -> ".join(map(str, each)) for each in zip(START, *PLACES[places], strict=True)
    )
    flipped = "step {}, row {}, token {}".format(*flip) if flip else "none"
    num_steps = f"{num_equal} of {STOPS[-1]} steps"
    print(
        f"| {engine} | {ranks} | {replicas} | {num_steps} | {difference:.0e}, {metric} | {flipped} "
        "|"
    )
    record_property(
        "result", f"{engine}: {num_steps} within {difference:.0e}; token that flips: {flipped}"
    )
