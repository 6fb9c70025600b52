"""A reward function that is an object of the user's process reaches the reward processes."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reward_processes import sample

from verl_like.rewards.given_function import FUNCTION_NAME, write_reward_function
from verl_like.rewards.loader import RewardFunctionSpec
from verl_like.rewards.manager import RewardManager

CELLS = """
WEIGHTS = {"a": 0.25, "b": 2.0}

def weight(character):
    return WEIGHTS[character]

def make(bonus):
    def score(data_source, solution_str, ground_truth, extra_info):
        total = bonus + sum(weight(character) for character in solution_str)
        return {"score": total, "long": len(solution_str) > 2}
    return score

score_with_bonus = make(0.5)
"""


def function_of_a_notebook(source: str, name: str) -> Callable[..., Any]:
    """What a cell defines: in the module `__main__`, and in no file."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "cell 3", "exec"), namespace)  # noqa: S102  the test's own text
    return namespace[name]


def test_a_function_of_a_notebook_scores_with_what_it_refers_to(tmp_path: Path):
    function = function_of_a_notebook(CELLS, "score_with_bonus")
    file = write_reward_function(function, tmp_path)
    manager = RewardManager(RewardFunctionSpec(str(file), FUNCTION_NAME), num_workers=1)
    result = manager.submit([sample("aab", 0), sample("b", 1)]).get()
    manager.close()
    # The bonus of 0.5 is of the closure, the weights are global variables.
    assert result.scores.tolist() == [0.5 + 0.25 + 0.25 + 2.0, 0.5 + 2.0]
    assert result.extra["long"].tolist() == [1.0, 0.0]


SCRIPT = """
import sys
from pathlib import Path
from verl_like.rewards.given_function import write_reward_function

WORDS = {"sum": 2.0, "thus": 0.5}

def length(text):
    return len(text.split())

def score(data_source, solution_str, ground_truth, extra_info):
    return WORDS.get(solution_str, 0.0) + length(solution_str)

write_reward_function(score, Path(sys.argv[1]))
"""


def test_a_script_that_is_started_again_gives_the_same_copy_so_that_its_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    (tmp_path / "script.py").write_text(SCRIPT)
    copies = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        folder = tmp_path / seed
        folder.mkdir()
        command = [sys.executable, str(tmp_path / "script.py"), str(folder)]
        subprocess.run(command, check=True, timeout=60)
        copies.append((folder / "reward_fn.py").read_text())
    assert copies[0] == copies[1]
    assert "#     return WORDS.get(solution_str, 0.0)" in copies[0]


def test_the_file_of_a_function_that_is_in_a_file_shows_its_source(tmp_path: Path):
    def of_this_file(data_source, solution_str, ground_truth, extra_info):
        return 3.5  # as a comment in the record

    text = write_reward_function(of_this_file, tmp_path).read_text()
    assert "#         return 3.5  # as a comment in the record\n" in text


def test_a_function_that_refers_to_what_stays_in_its_process_is_refused(tmp_path: Path):
    lock = threading.Lock()

    def score(data_source, solution_str, ground_truth, extra_info):
        return float(lock.locked())

    score.__module__ = "__main__"
    message = r"score.* cannot be sent to the reward processes \(TypeError: .*lock.*make the object"
    with pytest.raises(ValueError, match=message):
        write_reward_function(score, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_function_that_refers_to_much_data_is_refused(tmp_path: Path):
    table = b"x" * 20_000_000

    def score(data_source, solution_str, ground_truth, extra_info):
        return float(len(table))

    score.__module__ = "__main__"
    with pytest.raises(ValueError, match=r"has 20\.0 MB with what it refers to, and at most 16\.8"):
        write_reward_function(score, tmp_path)
