"""The benchmarks' own code, as far as it runs without the peers."""

import ast
import json
from statistics import median

import pytest

from benchmarks.harness import ROOT, Side
from benchmarks.sides import examples_world
from benchmarks.sides.grpo_world import STEPS_PER_LAW, lengths_of_step
from benchmarks.table import BEGIN, END, with_results

RESULT = {
    "benchmark": "sorting",
    "commit": "1a2b3c4",
    "title": "Sorting a million numbers",
    "date": "2026-01-02",
    "machine": "2 cores, slow",
    "cores_used_by_others": 0.0,
    "rows": [
        {
            "what": "ours",
            "unit": "ms",
            "median": 2.0,
            "least": 1.0,
            "greatest": 3.0,
            "rounds": 5,
            "ratios": {},
        },
        {
            "what": "theirs",
            "unit": "ms",
            "median": 8,
            "least": 8,
            "greatest": 9,
            "rounds": 5,
            "ratios": {"of_limit": 0.25},
        },
        {"what": "on a GPU", "why": "cuda only"},
    ],
    "targets": [
        {"what": "theirs / ours", "value": 4.0, "comparison": ">=", "bound": 5, "reached": False}
    ],
    "notes": ["One thread each."],
}


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks" / "sides").glob("*.py")]),
    ids=lambda path: path.stem,
)
def test_every_benchmark_and_every_side_parses(path):

    ast.parse(path.read_text())


def test_the_page_gets_the_targets_and_the_measurements_between_its_markers_and_keeps_the_rest():
    page = with_results(f"before\n{BEGIN}\nold\n{END}\nafter\n", [RESULT])
    assert (
        page.startswith(f"before\n{BEGIN}\n")
        and page.endswith(f"{END}\nafter\n")
        and "old" not in page
    )
    assert "| sorting | theirs / ours | 4 | >= 5 | **no** |" in page
    assert "Sorting a million numbers. 2026-01-02, commit 1a2b3c4, 2 cores, slow." in page
    assert "|  | median (least to greatest) | unit | of limit |" in page
    assert "| ours | 2 (1 to 3) | ms |  |" in page
    assert "| theirs | 8 (8 to 9) | ms | 0.25 |" in page
    assert "| on a GPU | cuda only |  |  |" in page
    assert "- One thread each." in page
    assert with_results(page, [RESULT]) == page


def test_a_result_without_a_commit_is_shown_as_older():
    older = {name: value for name, value in RESULT.items() if name != "commit"}
    page = with_results(f"{BEGIN}\n{END}\n", [older])
    assert "2026-01-02, an older commit that was not recorded, 2 cores, slow." in page


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="needs a line"):
        with_results(f"{END}\n{BEGIN}\n", [RESULT])


def test_forced_lengths_are_first_full_and_then_long_tailed_in_another_order_each_step():
    assert set(lengths_of_step(0)) == set(lengths_of_step(STEPS_PER_LAW - 1)) == {128}
    first, second = (lengths_of_step(STEPS_PER_LAW + step) for step in (0, 1))
    assert max(first) == 128 and sum(first) / 64 == pytest.approx(32, abs=0.5)
    assert first != second and sorted(first) == sorted(second)


def test_pairs_to_train_on_have_log_normal_lengths_and_fit_the_model(tmp_path):
    examples_world.write_rows(tmp_path / "pairs.jsonl", "dpo", 400)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    lengths = {
        side: [len(row[side][0]["content"].split()) for row in rows]
        for side in ("prompt", "chosen", "rejected")
    }
    assert median(lengths["prompt"]) == pytest.approx(64, rel=0.1)
    assert median(lengths["chosen"] + lengths["rejected"]) == pytest.approx(128, rel=0.1)
    assert max(lengths["chosen"]) > 4 * 128
    longest = max(p + max(c, r) for p, c, r in zip(*lengths.values(), strict=True))
    assert longest + 2 <= examples_world.LONGEST  # <turn> and <end>


@pytest.fixture
def failing_side(tmp_path):
    script = tmp_path / "failing_side.py"
    script.write_text(
        "import os\n"
        "from benchmarks.serve import serve\n"
        "def half(number): return {'half': number / 2}\n"
        "def fail(key): return {'value': {}[key]}\n"
        "def die(): print('about to die'); os._exit(7)\n"
        "serve(half, fail, die)\n"
    )
    side = Side("ours", str(script), "project")
    yield side
    side.close()


def test_a_side_answers_and_the_traceback_of_a_function_that_raises_is_in_the_error(failing_side):
    assert failing_side.call("half", number=5) == {"half": 2.5}
    with pytest.raises(
        RuntimeError, match=r"(?s)ours: fail failed.*Traceback.*in fail.*KeyError: 'colour'"
    ):
        failing_side.call("fail", key="colour")


def test_a_side_that_dies_is_told_with_its_status_and_the_end_of_its_log(failing_side):
    with pytest.raises(
        RuntimeError, match=r"(?s)ours: die failed.*status 7 .*The end of .*about to die"
    ):
        failing_side.call("die")
