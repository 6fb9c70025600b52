"""A checkpoint is there complete or not at all, and what is damaged is named."""

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kill_points import die_at, in_a_fork

from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.checkpoint import DamagedCheckpoint
from verl_like.trainer.state.run_state import StateModel


def save(run_dir: Path, step: int, text: str = "weights") -> None:
    partial = checkpoint.begin(run_dir, step)
    for role in ("actor", "critic"):
        (partial / role / "checkpoint").mkdir(parents=True)
        (partial / role / "checkpoint/shard.safetensors").write_text(f"{text} of {role} at {step}")
    checkpoint.commit(partial, step, {"kl_coef": step / 10}, {})


def test_files_that_workers_have_written_are_not_read_again_and_have_to_be_seen(tmp_path: Path):
    save(tmp_path, 1)
    partial, digest = checkpoint.begin(tmp_path, 2), {"bytes": 3, "sha256": "of the worker"}
    for name in ("shard", "generated"):
        (partial / name).write_text(name)
    with pytest.raises(
        OSError, match=r"global_step_2.partial/elsewhere, which is not seen from here"
    ):
        checkpoint.commit(partial, 2, {}, {"shard": digest, "elsewhere": digest})
    assert checkpoint.steps(tmp_path) == [1]
    checkpoint.commit(partial, 2, {}, {"shard": digest})
    files = json.loads((tmp_path / "global_step_2/manifest.json").read_text())["files"]
    assert files["shard"] == digest and files["generated"]["bytes"] == 9


def test_a_checkpoint_that_is_being_written_is_asked_for_once_and_not_waited_for(tmp_path: Path):
    class Answer:
        """What a worker group's call returns."""

        has_come = False

        def done(self) -> bool:
            return self.has_come

        def get(self, timeout: float | None) -> list[dict[str, Any]]:
            assert self.has_come, "waited"
            return [{"rank_0.safetensors": {"bytes": 3}}]

    answers: list[Answer] = []

    def ask(wait: bool) -> Answer:
        assert not wait
        answers.append(Answer())
        return answers[-1]

    groups: Any = {
        role: SimpleNamespace(save_result=SimpleNamespace(remote=ask))
        for role in ("actor", "critic")
    }
    pending = checkpoint.PendingCheckpoint(tmp_path, 4, {}, groups)
    assert pending.files(wait=False) is None
    answers[0].has_come = True
    assert pending.files(wait=False) is None
    answers[1].has_come = True
    paths = {"actor/checkpoint/rank_0.safetensors", "critic/checkpoint/rank_0.safetensors"}
    assert pending.files(wait=False).keys() == paths
    assert len(answers) == 2


def test_a_save_that_dies_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path):
    operation, code, found = 0, -signal.SIGKILL, []
    while code == -signal.SIGKILL:
        operation += 1
        run_dir = tmp_path / str(operation)
        run_dir.mkdir()
        save(run_dir, 1)

        def save_the_next(operation: int = operation, run_dir: Path = run_dir) -> None:
            die_at(operation, run_dir / "killed_at")
            save(run_dir, 2)
            checkpoint.keep(run_dir, 1)

        code = in_a_fork(save_the_next)
        newest, damages = checkpoint.newest(run_dir)
        assert newest and newest.state == {"kl_coef": newest.step / 10} and not damages
        found.append(newest.step)
        save(run_dir, 3)  # what the dead one left is in nobody's way
        assert checkpoint.newest(run_dir)[0].step == 3
    assert code == 0 and found == sorted(found) and found[0] == 1 and found[-1] == 2
    assert operation > 20 and found.count(2) > 3
    assert checkpoint.steps(run_dir) == [2, 3]


def unreadable(path: Path) -> None:
    """Puts a file in its place that can be opened, of which nothing can be read: memory from
    address 0."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "actor/checkpoint/shard.safetensors").write_text(
                "weights of actor at 1"
            ),
            r"actor/checkpoint/shard.safetensors is not as it was written: 21 bytes",
        ),
        (
            lambda folder: os.truncate(folder / "critic/checkpoint/shard.safetensors", 5),
            "critic.* 5 bytes",
        ),
        (
            lambda folder: (folder / "critic/checkpoint/shard.safetensors").unlink(),
            "critic.*No such file",
        ),
        (
            lambda folder: unreadable(folder / "critic/checkpoint/shard.safetensors"),
            r"critic/checkpoint/shard.safetensors cannot be read \(.*Input/output error",
        ),
        (
            lambda folder: unreadable(folder / "manifest.json"),
            r"manifest.json cannot be read \(.*Input/output error",
        ),
        (
            lambda folder: (folder / "actor/checkpoint/other.safetensors").touch(),
            "other.* is not in the manifest",
        ),
        (lambda folder: os.truncate(folder / "manifest.json", 30), "manifest.json cannot be read"),
        (
            lambda folder: (folder / "manifest.json").write_text("[]"),
            "manifest.json cannot be read",
        ),
        (
            lambda folder: replace(folder / "manifest.json", '"format": 2', '"format": 7'),
            "has format 7",
        ),
        (
            lambda folder: replace(folder / "manifest.json", '"kl_coef": 0.2', '"kl_coef": 0.6'),
            "manifest.json is not as it was written",
        ),
        (
            lambda folder: replace(folder / "manifest.json", '"bytes"', '"cytes"'),
            "is not as it was written",
        ),
        (
            lambda folder: replace(folder / "manifest.json", '"sha256": "', '"sha257": "'),
            "is not as it was written",
        ),
        (
            lambda folder: shutil.copy(folder.parent / "global_step_1/manifest.json", folder),
            "or of another folder",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_found(
    damage: Callable[[Path], object], message: str, tmp_path: Path
):
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "global_step_2")
    with pytest.raises(DamagedCheckpoint, match=message):
        checkpoint.read(tmp_path / "global_step_2")
    newest, damages = checkpoint.newest(tmp_path)
    assert newest == checkpoint.Checkpoint(tmp_path / "global_step_1", 1, {"kl_coef": 0.1})
    assert len(damages) == 1 and "global_step_2" in damages[0]


def test_without_hashes_a_checkpoint_is_checked_by_the_sizes_of_its_files(tmp_path: Path):
    save(tmp_path, 3, text="weights")
    folder, file = (
        tmp_path / "global_step_3",
        tmp_path / "global_step_3/actor/checkpoint/shard.safetensors",
    )
    file.write_text(file.read_text().replace("weights", "WEIGHTS"))
    assert checkpoint.read(folder, hashes=False).step == 3
    with pytest.raises(DamagedCheckpoint, match=r"shard\.safetensors is not as it was written"):
        checkpoint.read(folder)
    file.write_text("shorter")
    with pytest.raises(
        DamagedCheckpoint, match=r"shard\.safetensors is not as it was written: 7 bytes"
    ):
        checkpoint.read(folder, hashes=False)


def test_the_newest_checkpoints_by_number_are_kept_and_those_that_are_asked_for(tmp_path: Path):
    for step in (1, 9, 10, 11):
        save(tmp_path, step)
    (tmp_path / "global_step_12.partial").mkdir()
    (tmp_path / "global_step_13").mkdir()  # no manifest: no checkpoint
    checkpoint.keep(tmp_path, 2, others=[1])
    assert checkpoint.steps(tmp_path) == [1, 10, 11]


def test_an_old_checkpoint_that_cannot_be_removed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "global_step_1.old.partial").write_text("in the way")
    checkpoint.keep(tmp_path, 1)
    assert (
        checkpoint.steps(tmp_path) == [1, 2] and "An old checkpoint is not removed" in caplog.text
    )


def test_a_manifest_with_a_bit_flipped_is_named(tmp_path: Path):
    save(tmp_path, 2)
    manifest = tmp_path / "global_step_2/manifest.json"
    written = manifest.read_bytes()
    for bit in range(0, 8 * len(written), 7):
        flipped = bytearray(written)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        newest, (damage,) = checkpoint.newest(tmp_path, hashes=False)
        assert newest is None and damage.startswith(str(manifest)), bit


def test_what_a_save_or_a_removal_left_is_removed_and_nothing_else(tmp_path: Path):
    save(tmp_path, 1)
    for name in (
        "global_step_2.partial",
        "global_step_3.old.partial",
        "global_step_4",
        "global_step_5.damaged",
    ):
        (tmp_path / name / "actor").mkdir(parents=True)
    checkpoint.remove_partial(tmp_path)
    left = ["global_step_1", "global_step_4", "global_step_5.damaged"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_every_folder_of_a_checkpoint_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    (tmp_path / "runs").mkdir()
    save(tmp_path / "runs", 1)
    partial = tmp_path / "runs/global_step_1.partial"
    folders = [partial, partial / "actor", partial / "actor/checkpoint", partial / "critic"]
    assert {*map(str, folders)} <= {*synced} and synced[-2:] == [
        str(tmp_path / "runs"),
        str(tmp_path),
    ]


def test_a_file_that_no_worker_wrote_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    partial = checkpoint.begin(tmp_path, 1)
    for name in ("shard", "generated", "huggingface"):
        (partial / name).write_text(name)
    operations, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (operations.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    monkeypatch.setattr(
        os, "rename", lambda old, new: (operations.append("renamed"), rename(old, new))
    )
    checkpoint.commit(
        partial, 1, {}, {"shard": {"bytes": 5, "sha256": "of the worker, which synced it"}}
    )
    before = operations[: operations.index("renamed")]
    assert {str(partial / "generated"), str(partial / "huggingface")} <= {*before}
    assert str(partial / "shard") not in operations


def test_a_checkpoint_names_every_file_with_its_hash(tmp_path: Path):
    save(tmp_path, 4, text="x")
    manifest = json.loads((tmp_path / "global_step_4/manifest.json").read_text())
    assert (
        manifest["format"] == 2 and manifest["step"] == 4 and manifest["state"] == {"kl_coef": 0.4}
    )
    assert manifest["files"].keys() == {
        f"{role}/checkpoint/shard.safetensors" for role in ("actor", "critic")
    }
    sha256 = "f1f5c8e452ab460e8304c882b7518052358621276b3ce7c058c89ad68bcb7d90"  # of sha256sum
    assert manifest["files"]["actor/checkpoint/shard.safetensors"] == {
        "bytes": 15,
        "sha256": sha256,
    }


def forge(folder: Path, **values: object) -> None:
    """Changes a manifest and gives it the hash that fits, as anybody can."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | values
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


DIGEST = {"bytes": 1, "sha256": "0"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"files": {"/etc/hostname": DIGEST}}, "files./etc/hostname.*a path below the checkpoint"),
        (
            {"files": {"actor/../../outside": DIGEST}},
            "files.actor/../../outside.*a path below the checkpoint",
        ),
        (
            {"files": {"actor": {"bytes": "1", "sha256": "0"}}},
            "files.actor.bytes: Input should be a valid integer",
        ),
        ({"files": ["actor"]}, "files: Input should be an object"),
        ({"state": None}, "state: Input should be an object"),
        ({"step": "2"}, "step: Input should be a valid integer"),
        ({"more": 1}, "more: Extra inputs are not permitted"),
        ({"state": {"kl_coef": "0.2"}}, "kl_coef: Input should be a valid number"),
        ({"state": {"kl_coef": 0.2, "exec": "x"}}, "exec: Extra inputs are not permitted"),
    ],
)
def test_a_forged_manifest_is_refused_with_the_key_that_is_wrong(
    tmp_path: Path, values: dict, message: str
):
    class State(StateModel):
        kl_coef: float

    save(tmp_path, 2)
    forge(tmp_path / "global_step_2")
    assert checkpoint.newest(tmp_path, state_schema=State)[0].state == {"kl_coef": 0.2}
    forge(tmp_path / "global_step_2", **values)
    newest, (damage,) = checkpoint.newest(tmp_path, state_schema=State)
    assert newest is None and damage.startswith(
        f"{tmp_path}/global_step_2/manifest.json is not what a run"
    )
    assert re.search(message, damage) and "\n" not in damage


@pytest.mark.parametrize("name", ["manifest.json", "actor/checkpoint/shard.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(tmp_path: Path, name: str):
    save(tmp_path, 2)
    (tmp_path / "global_step_2" / name).unlink()
    os.mkfifo(tmp_path / "global_step_2" / name)
    newest, (damage,) = checkpoint.newest(tmp_path)
    assert (
        newest is None and f"{name} cannot be read" in damage and "is not a regular file" in damage
    )


def test_json_that_is_too_deep_is_named_and_not_descended_into(tmp_path: Path):
    save(tmp_path, 2)
    (tmp_path / "global_step_2/manifest.json").write_text("[" * 100_000)
    newest, (damage,) = checkpoint.newest(tmp_path)
    assert newest is None and "manifest.json cannot be read (recursion limit exceeded" in damage


def test_a_checkpoint_says_in_universal_time_when_it_was_written(tmp_path: Path):
    save(tmp_path, 3)
    manifest = json.loads((tmp_path / "global_step_3/manifest.json").read_text())
    assert datetime.fromisoformat(manifest["created"]).utcoffset() == timedelta(0)
