"""A folder belongs to the process that claimed it, as long as that lives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.claims import claim, remove_abandoned

HOLD = """
import sys
from pathlib import Path
from verl_like.claims import claim
mark = claim(Path(sys.argv[1]))
(Path(sys.argv[1]) / "kept").mkdir()
print("claimed", flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("run_of_other", "run_unclaimed", "another"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_folder_is_removed_once_the_process_that_claimed_it_was_killed(folders: Path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folders / "run_of_other")], **pipes
    ) as holder:
        assert holder.stdout.readline() == "claimed\n"
        remove_abandoned(folders, "run_*")
        assert (folders / "run_of_other/kept").is_dir()
        holder.kill()
    claim(folders / "another").close()
    remove_abandoned(folders, "run_*")
    assert names(folders) == ["another", "run_unclaimed"]  # nobody's, and one of another pattern


def test_a_process_does_not_remove_what_it_uses_itself(folders: Path):
    mark = claim(folders / "run_of_other")
    for _ in range(2):  # the first look must not release it
        remove_abandoned(folders, "run_*")
        assert (folders / "run_of_other").is_dir()
    mark.close()
    remove_abandoned(folders, "run_*")
    assert names(folders) == ["another", "run_unclaimed"]


def test_neither_a_link_to_a_folder_nor_a_mark_that_is_no_file_is_followed(folders: Path):
    claim(folders / "another").close()
    (folders / "run_latest").symlink_to(folders / "another")
    os.mkfifo(folders / "run_unclaimed/.claimed")
    remove_abandoned(folders, "run_*")
    assert names(folders) == ["another", "run_latest", "run_of_other", "run_unclaimed"]
