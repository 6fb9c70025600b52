"""Faults of detached training: what a side loses is made again, or the run ends and says who failed."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
from runs import AHEAD, GRPO, kill_once, metrics_of, num_steps_logged, run_apart, tiny_run_settings
from test_local_step import local_trainer
from test_maker_and_learner import SETTINGS, prompts_of

from verl_like.protocol import Part
from verl_like.trainer.detached import run_detached
from verl_like.trainer.detached.maker_holder import ExperienceMakerHolder
from verl_like.trainer.detached.side import PushedWeights, SentFuture, SideRecorder

pytestmark = pytest.mark.ray


@pytest.mark.proof
@pytest.mark.parametrize(
    ("title", "number", "reason"),
    [
        ("ExperienceMakerHolder", signal.SIGSTOP, r"maker_0\.report did not finish within 10 s"),
        ("rollout rank", signal.SIGKILL, r"rollout rank 0 \(node [\d.]+, pid \d+\) died during \w+"),
    ],
)
def test_a_maker_that_is_stopped_or_loses_a_worker_is_started_again_and_no_prompt_is_lost(
    title: str, number: int, reason: str, tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(run_detached, "ANSWER_S", 10.0)
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *GRPO, *AHEAD, "detached.experience_batch_size=1"]
    family: list[psutil.Process] = []

    def is_time() -> bool:
        if num_steps_logged(tmp_path) >= 2:
            family.extend(psutil.Process().children(recursive=True))
        return bool(family)

    killer = kill_once(title, number, when=is_time)
    assert run_apart(settings) == 0
    assert not killer.is_alive()
    output = capsys.readouterr().out
    assert re.search(f"maker_0 failed and is started again: {reason}", output), output
    assert output.count("is started again") == 1
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    counts = {name: steps[-1][f"detached/{name}"] for name in ("trained", "in_buffer", "in_flight", "again")}
    assert counts == {"trained": 20, "in_buffer": 0, "in_flight": 0, "again": 0}
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_a_maker_stays_on_its_version_where_the_trainer_died_in_mid_push(tmp_path: Path, tiny_llama: Callable):
    ray.init(num_cpus=1, include_dashboard=False)

    @ray.remote(num_cpus=0)
    class Exporting:
        """Owns what it exports, as a trainer does."""

        def export(self) -> list[Part]:
            return [Part(ray.put("header"), ray.put(b"weights"))]

    exporting = Exporting.remote()
    parts = ray.get(exporting.export.remote(), timeout=60)
    ray.kill(exporting)
    with local_trainer(tmp_path, tiny_llama, *SETTINGS) as trainer:
        holder_class = ExperienceMakerHolder.__ray_metadata__.modified_class
        holder = object.__new__(holder_class)
        holder.run, holder.config, holder.recorder = trainer, trainer.config, SideRecorder("maker_0")
        holder.version, holder.pushed = 0, PushedWeights(1, {"actor": SentFuture(parts, lambda results: results)})
        started = time.monotonic()
        holder.load_newest_weights()
        assert time.monotonic() - started < 30
        assert holder.version == 0
        made = trainer.maker.make(prompts_of(trainer, 1))
        assert {span[0] for spans in made.batch.non_tensor_batch["policy_version"] for span in spans} == {0}
    ray.shutdown()
