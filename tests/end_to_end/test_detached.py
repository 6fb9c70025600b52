"""Detached training: makers and trainers as drivers of their own, on a real Ray."""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import (
    AHEAD,
    APART,
    GRPO,
    kill_once,
    metrics_of,
    num_steps_logged,
    run_apart,
    run_on_ray,
    tiny_run_settings,
)
from safetensors.torch import load_file

from verl_like.protocol import DataProto
from verl_like.protocol.padded import padded
from verl_like.trainer.detached import run_detached
from verl_like.trainer.detached.record import DetachedRecord
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.ppo import maker_driver
from verl_like.trainer.state import checkpoint

pytestmark = pytest.mark.ray


def numbers(rows: list[dict]) -> list[dict]:
    """The metrics of each step that are no times."""
    times = (
        "timing_s/",
        "perf/",
        "actor/perf/",
        "critic/perf/",
        "reward/early_ratio",
        "detached/",
        "training/epoch",
    )
    return [
        {name: value for name, value in row.items() if not name.startswith(times)} for row in rows
    ]


def calls_of(folder: Path) -> Counter[str]:
    """How often each method ran on a rank in the latest run in `folder`."""
    return Counter(
        json.loads(line)["method"] for line in (folder / "runs/latest/timeline.jsonl").open()
    )


PPO = [
    *APART,
    "algorithm.use_kl_in_reward=true",
    "trainer.total_training_steps=4",
    "algorithm.kl_ctrl.kl_coef=0.2",
]
PPO += ["trainer.n_gpus_per_node=2", "algorithm.kl_ctrl.type=adaptive"]


def with_texts(folder: Path) -> list[str]:
    """Settings of a loss on texts beside the policy's."""
    (folder / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": "12+34=46"[:n]}) for n in range(2, 9))
    )
    return [f"data.ptx_files={folder}/texts.jsonl", "actor_rollout_ref.actor.ptx_coef=0.5"]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable) -> Path:
    """The folder of a synchronous run."""
    folder = tmp_path_factory.mktemp("synchronous")
    run_on_ray([*tiny_run_settings(folder, tiny_llama), *PPO, *with_texts(folder)])
    return folder


@pytest.mark.parametrize(
    "transport",
    [
        "object_store",
        *(pytest.param(name, marks=pytest.mark.proof) for name in ("shared_memory", "gloo")),
    ],
)
def test_at_staleness_0_a_detached_run_that_is_ended_and_continued_equals_the_synchronous_one_bit_for_bit(
    transport: str,
    synchronous: Path,
    tmp_path: Path,
    tiny_llama: Callable,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    class EndingRecord(DetachedRecord):
        """Sends SIGTERM when the run first heeds it."""

        def add(self, name: str, report: SideRecorder) -> None:
            super().add(name, report)
            if self.recorder.saves_when_ended and not self.recorder.is_ending:
                os.kill(os.getpid(), signal.SIGTERM)

    settings = [*tiny_run_settings(tmp_path, tiny_llama), *PPO, *with_texts(tmp_path)]
    settings += [f"actor_rollout_ref.rollout.weight_transport={transport}"]
    with monkeypatch.context() as patch:
        patch.setattr(run_detached, "DetachedRecord", EndingRecord)
        assert run_apart(settings) == 130
    (step,) = checkpoint.steps(tmp_path / "runs/latest")
    assert (
        1 <= step < 4
        and f"SIGTERM: the run ends with the checkpoint of step {step};" in capsys.readouterr().out
    )
    assert run_apart(settings) == 0
    output = capsys.readouterr().out
    assert f"after step {step}.\n" in output
    assert f"Prompts: {4 * step} trained, 0 training, 0 in_buffer, 0 in_flight, 0 again" in output
    folders = {"synchronous": synchronous, "detached": tmp_path}
    steps = {
        name: [row for row in numbers(metrics_of(folder)) if "actor/loss" in row]
        for name, folder in folders.items()
    }
    assert len(steps["detached"]) == 4
    assert [row["step"] for row in metrics_of(tmp_path) if "actor/loss" not in row] == [
        0,
        1,
        2,
        3,
        4,
    ]
    for expected, found in zip(steps["synchronous"], steps["detached"], strict=True):
        shared = expected.keys() & found.keys() - {
            name for name in expected if name.startswith("val-")
        }
        assert shared > {
            "actor/loss",
            "critic/loss",
            "critic/values/mean",
            "actor/reward_kl_penalty",
            "actor/ptx_loss",
            "actor/reward_kl_penalty_coeff",
            "actor/grad_norm",
        }
        assert {name: expected[name] for name in shared} == {name: found[name] for name in shared}
    for role in ("actor", "critic"):
        model = f"runs/latest/global_step_4/{role}/huggingface/model.safetensors"
        expected, found = (load_file(folder / model) for folder in folders.values())
        assert expected.keys() == found.keys()
        assert all((expected[name] == found[name]).all() for name in expected)


# The first process that validates after the last step dies.
DYING = """
import os
import pathlib
import signal

from verl_like.trainer.ppo.maker_driver import MakerDriver, register_maker_driver


@register_maker_driver
class DriverThatDies(MakerDriver):
    def validate(self):
        has_died = pathlib.Path(__file__).parent / "has_died"
        if self.global_step == self.config.trainer.total_training_steps and not has_died.exists():
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().validate()
"""


@pytest.fixture
def plugin_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The key of a plugin whose maker dies in the last validation, once."""
    (tmp_path / "plugin_that_dies.py").write_text(DYING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(maker_driver.DRIVERS, "entries", dict(maker_driver.DRIVERS.entries))
    yield "plugins=[plugin_that_dies]"
    del sys.modules["plugin_that_dies"]


def test_a_maker_that_is_killed_loses_no_prompt_and_is_started_again_also_in_the_last_validation(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture, plugin_that_dies: str
):
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *GRPO,
        *AHEAD,
        "detached.experience_batch_size=1",
    ]
    # A step takes a tenth of a second
    settings += ["trainer.total_training_steps=30", plugin_that_dies]
    killer = kill_once(
        "ExperienceMakerHolder", signal.SIGKILL, when=lambda: num_steps_logged(tmp_path) >= 6
    )
    assert run_apart(settings) == 0
    assert not killer.is_alive()
    validations = [
        row["step"] for row in metrics_of(tmp_path) if "val-core/exact_match/acc/mean@1" in row
    ]
    validated = [step // 5 for step in validations]
    assert validated == sorted(set(validated)), (
        "the maker that was started again validates when it is due"
    )
    assert validations[-1] == 30
    assert checkpoint.newest(tmp_path / "runs/latest")[0].state["validated"] == 30
    output = capsys.readouterr().out
    assert output.count("maker_0 failed and is started again: maker_0 rank 0") == 2
    assert (
        "Prompts: 120 trained, 0 training, 0 in_buffer, 0 in_flight, 0 again, 0 not_started\n"
        in output
    )
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert [row["detached/trained"] for row in steps] == list(range(4, 121, 4)), (
        "the counts are those of the step"
    )
    assert all(
        0 <= row[f"detached/idle/{side}"] <= 1 for row in steps for side in ("maker_0", "trainer_0")
    )
    counts = {
        name: steps[-1][f"detached/{name}"]
        for name in ("trained", "in_buffer", "in_flight", "again")
    }
    assert counts == {"trained": 120, "in_buffer": 0, "in_flight": 0, "again": 0}
    assert max(row["training/staleness/max"] for row in steps) <= 1
    # Each of the two mini-batches of a step by itself
    assert calls_of(tmp_path)["update_actor"] == 2 * 30


@pytest.mark.proof
def test_a_run_that_fails_in_its_last_validation_has_the_checkpoint_of_its_last_step(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture, plugin_that_dies: str
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *GRPO, "trainer.total_training_steps=3"]
    assert run_apart([*settings, plugin_that_dies, "detached.max_restarts=0"]) == 1
    assert "maker_0 rank 0" in capsys.readouterr().err
    run_dir = tmp_path / "runs/latest"
    assert checkpoint.steps(run_dir) == [3] and checkpoint.newest(run_dir)[1] == []
    assert (run_dir / "global_step_3/actor/huggingface/model.safetensors").exists()


@pytest.mark.proof
@pytest.mark.parametrize("num_trainers", [1, 2])
def test_actor_and_critic_train_each_mini_batch_of_a_step_as_it_arrives_and_two_trainers_outlive_a_maker(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture, num_trainers: int
):
    num_steps = {1: 5, 2: 40}[num_trainers]
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *APART,
        *AHEAD,
        f"detached.num_trainers={num_trainers}",
    ]
    settings += [
        "detached.experience_batch_size=1",
        "trainer.critic_warmup=1",
        "trainer.save_freq=5",
    ]
    settings += [
        "algorithm.rollout_correction.bypass_mode=true",
        f"trainer.total_training_steps={num_steps}",
    ]
    if num_trainers == 2:
        settings += ["detached.routing=least_loaded", "detached.update_steps=2"]
        kill_once(
            "ExperienceMakerHolder", signal.SIGKILL, when=lambda: num_steps_logged(tmp_path) >= 3
        )
    assert run_apart(settings) == 0
    assert capsys.readouterr().out.count("maker_0 failed and is started again") == num_trainers - 1
    steps = [row for row in metrics_of(tmp_path) if "critic/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    assert ["actor/loss" in row for row in steps] == [False] + [True] * (num_steps - 1)
    assert [row["detached/trained"] for row in steps] == [4 * row["step"] for row in steps]
    counts = {
        name: steps[-1][f"detached/{name}"]
        for name in ("training", "in_buffer", "in_flight", "again")
    }
    assert counts == {"training": 0, "in_buffer": 0, "in_flight": 0, "again": 0}
    assert max(row["training/staleness/max"] for row in steps) <= 1
    calls = calls_of(tmp_path)
    assert calls["update_critic"] == 2 * num_steps * num_trainers
    assert calls["update_actor"] == 2 * (num_steps - 1) * num_trainers
    # By the first trainer, before the first step and after every `update_steps`; out of turn, where
    # the maker that was started again is compared with weights that were not pushed.
    pushes = 1 + num_steps // num_trainers
    # Of actor and critic
    assert calls["export_weights"] in (2 * pushes, 2 * (pushes + num_trainers - 1))


# Responses have 8 tokens, those to the first prompt of the data 160. What a maker has made is
# written in that order.
FORCED_LENGTHS = """
import dataclasses
import pathlib
import time

from verl_like.single_controller import Dispatch, register
from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.maker_driver import MakerDriver, register_maker_driver
from verl_like.workers.rollout_worker import RolloutWorker


class ForcedLengths(RolloutWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        super().init_model()
        submit = self.engine_thread.submit
        self.engine_thread.submit = lambda requests: submit([self.forced(request) for request in requests])
        step = self.rollout._step

        def slow_step():
            time.sleep(0.02)  # the other prompts are made, and weights come, while a long response is drawn
            return step()

        self.rollout._step = slow_step

    def forced(self, request):
        max_tokens = 160 if "-0)" in request.name else 8
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_tokens=max_tokens))


class KeepingMaker(ExperienceMaker):
    def complete(self, generated):
        experience = super().complete(generated)
        experience.batch.save_to_disk(pathlib.Path(__file__).parent / "made" / str(time.time_ns()))
        return experience


@register_maker_driver
class DriverOfKeepingMaker(MakerDriver):
    def build_maker(self):
        return KeepingMaker(**vars(super().build_maker()))
"""


@pytest.mark.proof
def test_a_maker_sends_what_has_ended_and_begins_others_while_it_generates_and_loses_nothing_when_it_is_killed(
    tmp_path: Path,
    tiny_llama: Callable,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "forced_lengths.py").write_text(FORCED_LENGTHS)
    (tmp_path / "made").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(maker_driver.DRIVERS, "entries", dict(maker_driver.DRIVERS.entries))
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *GRPO,
        *AHEAD,
        "detached.update_in_flight=true",
    ]
    settings += ["detached.restart_below=150"]  # all but short rests of the long ones
    settings += ["plugins=[forced_lengths]", "worker_classes.rollout=forced_lengths.ForcedLengths"]
    settings += [
        "actor_rollout_ref.rollout.ignore_eos=true",
        "data.max_response_length=160",
        "data.shuffle=false",
    ]
    settings += ["resource_pool_spec.maker_pool=[2]", "trainer.val_before_train=false"]
    killer = kill_once(
        "ExperienceMakerHolder", signal.SIGKILL, when=lambda: num_steps_logged(tmp_path) >= 3
    )
    assert run_apart(settings) == 0
    assert not killer.is_alive()
    assert capsys.readouterr().out.count("maker_0 failed and is started again") == 1
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    counts = {
        name: steps[-1][f"detached/{name}"]
        for name in ("trained", "in_buffer", "in_flight", "again")
    }
    assert counts == {"trained": 20, "in_buffer": 0, "in_flight": 0, "again": 0}
    assert max(row["training/staleness/max"] for row in steps) <= 1

    made = [DataProto.load_from_disk(path) for path in sorted((tmp_path / "made").iterdir())]
    for batch in made:
        lengths = padded(batch).batch["response_mask"].sum(-1).tolist()
        uids = batch.non_tensor_batch["uid"].tolist()
        assert lengths == [160 if uid.endswith("-0") else 8 for uid in uids]
        assert uids[::2] == uids[1::2]
        first = {
            uid: spans[0]
            for uid, spans in zip(uids, batch.non_tensor_batch["policy_version"], strict=True)
        }
        # Its ticket is of version 0, and the maker looks up to a second after it has new weights
        if "0-0" in first:
            assert first["0-0"][0] > 0 or first["0-0"][2] >= 100
    # Four are in flight at first; when 0-0 ends, all that the ledger allows before step 1 has been
    # made.
    order = [uid for batch in made for uid in batch.non_tensor_batch["uid"].tolist()[::2]]
    assert {f"0-{row}" for row in range(1, 8)} <= set(order[: order.index("0-0")])
    assert {len(batch) for batch in made} <= {2, 4, 6, 8} and len(made) > 20 / 4
