"""Which run is continued, and what is refused."""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_points import die_at, in_a_fork
from pydantic import ValidationError
from runs import APART, tiny_run_settings

from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedBlock, DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.ledger import PromptLedger
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run import run_recorder
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.resume import find_run, lock_run
from verl_like.trainer.state.run_state import DetachedState, LoopState, PluginPPOState, PPOState


@pytest.fixture
def config_with(tmp_path: Path, tiny_llama: Callable) -> Callable[..., PPOConfig]:
    settings = [*tiny_run_settings(tmp_path, tiny_llama), "trainer.total_training_steps=4"]
    return lambda *further: load_ppo_config([*settings, *further])


def run_until(step: int, config: PPOConfig) -> Path:
    """The folder of a run that logged and saved that many steps and died in the next."""
    recorder = RunRecorder(config, PPO_DISPLAY, find_run(config)[0])
    first = recorder.resumed.checkpoint.step + 1 if recorder.resumed else 1
    for number in range(first, step + 1):
        save(recorder, number)
    recorder.tracking.log({"reward": 0.5}, step + 1)
    recorder.lock.close()
    return recorder.run_dir


def save(recorder: RunRecorder, number: int) -> None:
    """Logs a step and saves it."""
    recorder.tracking.log({"reward": 0.5}, number)
    partial = checkpoint.begin(recorder.run_dir, number)
    (partial / "weights").write_text(str(number))
    recorder.begin_checkpoint(partial, number, {"kl_coef": 0.1}, groups={})
    recorder.commit_checkpoint(wait=True)


def found(config: PPOConfig) -> tuple[Path, int]:
    run, _ = find_run(config)
    assert run
    run.lock.close()
    return run.run_dir, run.checkpoint.step


def test_the_newest_unfinished_run_of_the_same_numbers_is_continued(config_with: Callable):
    assert find_run(config_with()) == (None, [])
    first = run_until(2, config_with())
    other = run_until(1, config_with("trainer.seed=5"))
    finished = run_until(4, config_with("trainer.resume_mode=disable"))
    assert len({first, other, finished}) == 3
    assert found(config_with()) == (first, 2)
    assert found(config_with("trainer.seed=5")) == (other, 1)
    # More steps than it had, so it is not finished.
    assert found(config_with("trainer.total_training_steps=6", "trainer.n_gpus_per_node=2")) == (
        finished,
        4,
    )
    run, notes = find_run(config_with("trainer.resume_mode=disable"))
    assert run is None and not notes
    run, notes = find_run(config_with("actor_rollout_ref.actor.optim.lr=0.5"))
    assert run is None
    assert f"{other} is unfinished and is not continued: it has " in notes[0]
    assert (
        "actor_rollout_ref.actor.optim.lr=0.001 (here: 0.5); trainer.seed=5 (here: 42)" in notes[0]
    )


def test_detached_training_and_the_synchronous_one_do_not_continue_each_others_runs(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *APART, "trainer.total_training_steps=4"]
    synchronous = load_ppo_config(settings)
    detached = load_config(DetachedConfig, broken_detached_rules, settings)
    for config, other in ((synchronous, detached), (detached, synchronous)):
        run_dir = run_until(2, config)
        run, notes = find_run(other)
        assert (
            run is None
            and f"{run_dir} is unfinished and is not continued: it has detached." in notes[-1]
        )
        assert found(config) == (run_dir, 2)
        run_until(4, config)


def test_a_run_that_is_named_is_continued_or_says_what_differs(
    config_with: Callable, tmp_path: Path
):
    folder = run_until(2, config_with())
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
    assert found(config_with(*named, f"trainer.default_local_dir={tmp_path}/elsewhere")) == (
        folder,
        2,
    )
    with pytest.raises(
        ValueError, match=r" has trainer\.seed=42 \(here: 5\): give what changes numbers as it was"
    ):
        find_run(config_with(*named, "trainer.seed=5"))
    with pytest.raises(ValueError, match="has no checkpoint"):
        find_run(config_with(named[0], f"trainer.resume_from_path={tmp_path}"))
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path"):
        config_with(named[0])
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path"):
        config_with(named[1])


def test_a_run_whose_data_changed_is_refused(config_with: Callable, tmp_path: Path):
    run_until(2, config_with())
    (train_file,) = config_with().data.train_files
    with open(train_file, "ab") as file:
        file.write(b" ")
    with pytest.raises(ValueError, match=r"read other files than there are now: data\.train_files"):
        find_run(config_with())


def test_a_damaged_checkpoint_is_skipped_and_named_or_refused(config_with: Callable):
    folder = run_until(2, config_with())
    (folder / "global_step_2/weights").write_text("3")
    run, notes = find_run(config_with())
    assert run and run.checkpoint.step == 1
    assert (
        "Skipped a damaged checkpoint" in notes[0]
        and "global_step_2/weights is not as it was written" in notes[0]
    )
    run.lock.close()
    with pytest.raises(
        ValueError, match=r"global_step_2/weights is not .* set trainer.damaged_ckpt=skip"
    ):
        find_run(config_with("trainer.damaged_ckpt=refuse"))
    (folder / "global_step_1/weights").unlink()
    run, notes = find_run(config_with())
    assert run is None and len(notes) == 2
    with pytest.raises(
        ValueError, match=r"global_step_2/weights is not .*global_step_1/weights cannot be read"
    ):
        find_run(
            config_with("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
        )


def test_a_live_run_is_named_and_not_continued(config_with: Callable):
    folder = run_until(2, config_with())
    hold = (
        "import sys; from pathlib import Path; from verl_like.trainer.state.resume import "
        "lock_run\n"
    )
    hold += "lock = lock_run(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(
            ValueError, match=rf"is being written by another run \(process {holder.pid} on"
        ):
            find_run(config_with())
        holder.stdin.close()
    assert found(config_with()) == (folder, 2)


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_what_dead_runs_were_saving_is_removed_when_a_run_starts_and_what_a_live_one_saves_stays(
    mode: str, config_with: Callable, tmp_path: Path
):
    config = config_with(f"trainer.resume_mode={mode}")

    def start_to_save(step: int) -> RunRecorder:
        recorder = RunRecorder(config, PPO_DISPLAY)
        (checkpoint.begin(recorder.run_dir, step) / "weights").write_text("half")
        return recorder

    dead, live = start_to_save(1), start_to_save(2)
    dead.lock.close()
    locked_by_nobody = tmp_path / "runs/of_somebody_else/global_step_3.partial"
    locked_by_nobody.mkdir(parents=True)
    (tmp_path / "runs/unreadable/.lock").mkdir(parents=True)
    (tmp_path / "runs/unreadable/global_step_3.partial").mkdir()
    assert find_run(config) == (
        None,
        [f"Removed {dead.run_dir}/global_step_1.partial, which a killed run left."],
    )
    assert (live.run_dir / "global_step_2.partial/weights").read_text() == "half"
    assert not list(dead.run_dir.glob("*.partial")) and locked_by_nobody.exists()
    live.lock.close()
    assert find_run(config) == (
        None,
        [f"Removed {live.run_dir}/global_step_2.partial, which a killed run left."],
    )
    assert find_run(config) == (None, [])


def test_what_a_run_wrote_after_its_checkpoint_is_cut_off(config_with: Callable):
    folder = run_until(2, config_with())
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert run_until(3, config_with()) == folder
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4]
    assert checkpoint.steps(folder) == [1, 2, 3]
    run_until(4, config_with("trainer.max_ckpt_to_keep=2"))
    assert checkpoint.steps(folder) == [3, 4]


def test_a_damaged_checkpoint_is_set_aside_and_pushes_no_good_one_out(config_with: Callable):
    config = config_with("trainer.max_ckpt_to_keep=2", "trainer.total_training_steps=9")
    folder = run_until(6, config)
    assert checkpoint.steps(folder) == [5, 6]
    (folder / "global_step_6/weights").write_text("7")
    (folder / "global_step_9.partial").mkdir()
    recorder = RunRecorder(config, PPO_DISPLAY, find_run(config)[0])
    recorder.lock.close()
    assert sorted(path.name for path in folder.glob("global_step_*")) == [
        "global_step_5",
        "global_step_6.damaged",
    ]
    assert (run_until(7, config), checkpoint.steps(folder)) == (folder, [6, 7])
    assert found(config) == (folder, 7)


def test_a_best_checkpoint_that_is_gone_is_forgotten(config_with: Callable):
    keys = [
        f"trainer.{key}" for key in ("max_ckpt_to_keep=2", "best_ckpt_metric=acc", "test_freq=1")
    ]
    recorder = RunRecorder(config_with(*keys), PPO_DISPLAY)
    for step, accuracy in enumerate([0.5, 0.4, 0.6], 1):
        recorder.is_best(step, {"acc": accuracy})
        save(recorder, step)
    recorder.lock.close()
    # That of step 1 was the best one until step 3
    assert checkpoint.steps(recorder.run_dir) == [2, 3]
    (recorder.run_dir / "global_step_3/weights").write_text("4")
    again = RunRecorder(config_with(*keys), PPO_DISPLAY, find_run(config_with(*keys))[0])
    again.lock.close()
    assert again.resumed.checkpoint.state["best"]["step"] == 1
    assert again.is_best(3, {"acc": 0.45}) and again.best["step"] == 3


def test_a_finished_run_whose_last_checkpoint_is_cut_is_unfinished(config_with: Callable):
    folder = run_until(4, config_with())
    assert find_run(config_with()) == (None, [])
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
    with pytest.raises(
        ValueError, match=r"already has 4 of 3 steps: raise trainer\.total_training_steps, or"
    ):
        find_run(config_with(*named, "trainer.total_training_steps=3"))
    (folder / "global_step_4/weights").write_text("")
    assert found(config_with()) == (folder, 3)
    assert found(config_with(*named)) == (folder, 3)


def test_a_record_that_is_shorter_than_it_was_is_not_filled_up(config_with: Callable):
    folder = run_until(2, config_with())
    first = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (folder / "metrics.jsonl").write_text(first)
    run_until(3, config_with())
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 3, 4]


def test_the_record_is_on_the_disk_before_the_checkpoint_that_counts_on_it(
    config_with: Callable, monkeypatch: pytest.MonkeyPatch
):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink().name), fsync(fd)),
    )
    run_until(1, config_with())
    before = synced[: synced.index("manifest.json.partial")]
    assert {"metrics.jsonl", "timeline.jsonl", "config.yaml.partial", "inputs.json.partial"} <= {
        *before
    }


@pytest.mark.proof
@pytest.mark.parametrize("num_steps", [0, 3], ids=["new", "continued"])
def test_a_run_that_is_killed_at_any_operation_until_its_next_checkpoint_loses_none(
    num_steps: int, config_with: Callable, tmp_path: Path
):
    own = config_with("trainer.max_ckpt_to_keep=2")

    def config_in(folder: Path) -> PPOConfig:
        return own.updated({"trainer.default_local_dir": str(folder)})

    def train_and_die(config: PPOConfig, operation: int, killed_at: Path) -> None:
        die_at(operation, killed_at, within=str(tmp_path))
        run_until(num_steps or 1, config)

    (before := tmp_path / "before").mkdir()
    if num_steps:
        folder = run_until(num_steps, config_in(before))
        (folder / f"global_step_{num_steps}/weights").write_text("damaged")
        for name in ("global_step_1.old.partial", "global_step_4.partial"):
            (folder / name).mkdir()
    code, operations, continued = -signal.SIGKILL, [], []
    while code == -signal.SIGKILL:
        runs, killed_at = tmp_path / str(len(operations)), tmp_path / f"killed_at_{len(operations)}"
        shutil.copytree(before, runs, symlinks=True)
        config = config_in(runs)
        code = in_a_fork(train_and_die, config, len(operations) + 1, killed_at)
        operations.append(killed_at.read_text())
        run, _ = find_run(config)
        continued.append(run.checkpoint.step if run else 0)
        if run:
            run.lock.close()
        folder = run_until(4, config)
        assert not run or folder == run.run_dir
        rows = [
            json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        assert rows == [1, 2, 3, 4, 5] and checkpoint.steps(folder) == [3, 4], operations
        assert not list(folder.glob("*.partial")), operations
    named = operations.index(f"os.rename global_step_{num_steps or 1}.partial") + 1
    first = max(0, num_steps - 1)
    assert code == 0 and continued == [first] * named + [first + 1] * (len(operations) - named)
    assert named > 20


def test_what_a_killed_process_of_the_same_number_left_is_in_nobodys_way(
    config_with: Callable, tmp_path: Path
):
    (tmp_path / "runs").mkdir()
    (tmp_path / f"runs/.latest.{os.getpid()}").symlink_to("of_another")
    folder = run_until(1, config_with())
    assert (tmp_path / "runs/latest").resolve() == folder


def test_latest_is_the_run_that_is_continued(config_with: Callable):
    folder = run_until(1, config_with())
    newer = run_until(4, config_with("trainer.resume_mode=disable"))
    latest = folder.parent / "latest"
    assert latest.resolve() == newer
    assert run_until(2, config_with()) == folder and latest.resolve() == folder


def test_a_process_locks_a_run_once_and_gives_it_back_when_it_refuses(config_with: Callable):
    folder = run_until(2, config_with())
    (folder / "global_step_2/weights").write_text("3")
    with pytest.raises(ValueError, match="damaged_ckpt=skip"):
        find_run(config_with("trainer.damaged_ckpt=refuse"))
    lock = lock_run(folder)
    for _ in range(2):
        with pytest.raises(ValueError, match="is being written by this process"):
            find_run(config_with())
    lock.close()
    assert found(config_with()) == (folder, 1)


def test_the_lock_is_held_until_the_report_is_written(
    config_with: Callable, monkeypatch: pytest.MonkeyPatch
):
    recorder = RunRecorder(config_with(), PPO_DISPLAY)
    open_at_report = []
    monkeypatch.setattr(
        run_recorder,
        "write_report",
        lambda *_, **__: open_at_report.append(not recorder.lock.closed),
    )
    recorder.close("Done.")
    assert open_at_report == [True] and recorder.lock.closed


def test_a_folder_that_cannot_be_locked_is_refused(config_with: Callable):
    folder = run_until(2, config_with())
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()
    with pytest.raises(
        ValueError, match=r"cannot be locked .*give another trainer\.default_local_dir"
    ):
        find_run(config_with())


def forge(folder: Path, **values: object) -> None:
    """Changes the state in a manifest and gives it the hash that fits, as anybody can."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["state"] |= values
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def test_a_manifest_shortens_the_files_of_the_record_alone(config_with: Callable, tmp_path: Path):
    config = config_with()
    folder = run_until(1, config)
    (tmp_path / "precious").write_text("all that there is")
    for name in (str(tmp_path / "precious"), "../../precious", "config.yaml"):
        forge(folder / "global_step_1", files={"metrics.jsonl": 0, "timeline.jsonl": 0, name: 0})
        run, notes = find_run(config)
        assert (
            run is None
            and f"manifest.json is not what a run of this kind writes: files.{name}: Extra"
            in notes[0]
        )
    assert (tmp_path / "precious").read_text() == "all that there is" and (
        folder / "config.yaml"
    ).stat().st_size


STATES_OF_WRONG_TYPES = [
    ({"files": {"metrics.jsonl": -1, "timeline.jsonl": 0}}, "files.metrics.jsonl"),
    ({"files": {"metrics.jsonl": 0}}, "files.timeline.jsonl"),
    ({"shown": {"generations": [{"step": [1]}], "num_validations": 1}}, "shown.generations.0.step"),
    ({"shown": {"generations": [], "num_validations": True}}, "shown.num_validations"),
    ({"best": {"step": 1, "metric": None, "value": 0.5}}, "best.Best.metric"),
]


def test_a_state_of_wrong_types_is_refused_with_the_key(config_with: Callable):
    config = config_with()
    folder = run_until(1, config)
    written = (folder / "global_step_1/manifest.json").read_text()
    for values, key in STATES_OF_WRONG_TYPES:
        (folder / "global_step_1/manifest.json").write_text(written)
        forge(folder / "global_step_1", **values)
        run, notes = find_run(config)
        assert run is None and f" is not what a run of this kind writes: {key}" in notes[0]


def test_the_states_that_runs_save_fit_their_schemas_and_others_do_not(config_with: Callable):
    record = {
        "files": {"metrics.jsonl": 1, "timeline.jsonl": 2},
        "shown": {"generations": [], "num_validations": 0},
    }
    loop = record | {"global_step": 3, "best": {"step": 3, "metric": "val-core/acc", "value": 0.5}}
    ppo = loop | {"num_prompt_batches": 4, "upcoming_batch": 3, "version": 3, "kl_coef": 0.25}
    ledger = PromptLedger(4, 6, DetachedBlock(num_makers=1, num_trainers=2), max_staleness=1)
    ledger.take("maker_0.1", 0, 3)
    ledger.keep_kl_coef(0, 0.125)
    detached = record | {
        "ledger": ledger.state() | {"effective_sample_sizes": [math.nan]},
        "validated": -1,
    }
    schemas = {LoopState: loop, PPOState: ppo, DetachedState: detached}
    for schema in schemas:
        for of, state in schemas.items():
            text = json.dumps(state)
            if of is schema:
                schema.model_validate_json(text)
            else:
                with pytest.raises(ValidationError):
                    schema.model_validate_json(text)
    PluginPPOState.model_validate_json(json.dumps(ppo | {"own": [1]}))
    with pytest.raises(ValidationError):
        PPOState.model_validate_json(json.dumps(ppo | {"own": [1]}))


def test_a_file_of_an_old_run_that_is_not_its_own_is_named(config_with: Callable):
    config = config_with()
    folder = run_until(1, config)
    for name in ("inputs.json", "config.yaml"):
        written = (folder / name).read_text()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        _, (note,) = find_run(config)
        assert (
            str(folder) in note
            and f"that can be read ({folder / name} is not a regular file)" in note
        )
        (folder / name).unlink()
        for content in ("[" * 100_000, "- 1\n", "{a: &a [1], b: *a}", "a: [", "\0"):
            (folder / name).write_text(content)
            _, (note,) = find_run(config)
            assert str(folder) in note and "that can be read (" in note
        (folder / name).write_text(written)


def test_what_stands_in_the_place_of_the_record_is_refused(config_with: Callable, tmp_path: Path):
    config = config_with()
    folder = run_until(1, config)
    (tmp_path / "precious").write_text("all that there is")
    places = {
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to(tmp_path / "precious"),
        "folder": lambda path: path.mkdir(),
    }
    for name in ("metrics.jsonl", "timeline.jsonl"):
        written = (folder / name).read_text()
        for kind, make in places.items():
            (folder / name).unlink()
            make(folder / name)
            run, _ = find_run(config)
            with pytest.raises((OSError, ValueError), match=name):
                RunRecorder(config, PPO_DISPLAY, run)
            run.lock.close()
            (folder / name).rmdir() if kind == "folder" else (folder / name).unlink()
            (folder / name).write_text(written)
    assert (tmp_path / "precious").read_text() == "all that there is"
