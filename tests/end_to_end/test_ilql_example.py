"""The example of ILQL: its walks and exact scores, and as a proof the whole command."""

import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from examples.ilql.scores import mean_score, scores, uniform
from examples.ilql.walks import (
    GOAL,
    MAX_STEPS,
    PLACES,
    VOCABULARY,
    Graph,
    best_score,
    make_graph,
    make_walks,
    score,
)
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.supervised import ILQLConfig, SFTConfig, broken_supervised_rules

ROOT = Path(__file__).parents[2]
SMALL = {"b": "ac", "c": "bd", "d": "cb"}  # from b, c and d the goal is 1, 2 and 2 steps away


def test_a_walk_that_arrives_scores_the_steps_that_are_left():
    assert [score(SMALL, "c", walk) for walk in ("ba", "dcba", "baaad", "bcba")] == [7, 5, 7, 5]
    assert [score(SMALL, "c", walk) for walk in ("", "b", "a", "bda", "x", "bcbcbcbcba")] == [0] * 6
    assert [best_score(SMALL, start) for start in "bcd"] == [8, 7, 7]


def test_the_walks_are_random_ones_with_their_scores():
    graph = make_graph(1)
    assert graph == make_graph(1) != make_graph(2) and len(graph) == len(PLACES) - 1
    assert sum(GOAL in roads for roads in graph.values()) == 2 and {
        len(set(roads)) for roads in graph.values()
    } == {2}
    rows = make_walks(graph, 1)
    for row in rows[:200]:
        walk = row["prompt"] + row["response"]
        assert all(there in graph[here] for here, there in pairwise(walk))
        assert row["score"] == (MAX_STEPS + 1 - len(row["response"]) if walk.endswith(GOAL) else 0)
        assert walk.endswith(GOAL) or len(row["response"]) == MAX_STEPS
    assert sum(row["score"] for row in rows) / len(rows) == pytest.approx(
        mean_score(graph, uniform(graph)), abs=0.15
    )


def test_the_mean_score_is_exact():
    def by_recursion(graph: Graph, here: str, step: int) -> float:
        if here == GOAL or step == MAX_STEPS:
            return 0
        return sum(
            0.5 * ((MAX_STEPS - step) * (t == GOAL) + by_recursion(graph, t, step + 1))
            for t in graph[here]
        )

    expected = sum(by_recursion(SMALL, start, 0) for start in SMALL) / 3
    assert mean_score(SMALL, uniform(SMALL)) == pytest.approx(expected)

    def first_road(texts: list[str]) -> torch.Tensor:
        """The road that is named first, in one case of four no road at all."""
        ids = torch.tensor(
            [VOCABULARY.index(SMALL[text.replace(">", "")[-1]][0]) for text in texts]
        )
        return 0.75 * torch.nn.functional.one_hot(ids, len(VOCABULARY)).double()

    assert mean_score(SMALL, first_road) == pytest.approx(
        (0.75 * 8 + 0.75**2 * 7 + 0.75**3 * 6) / 3
    )


def test_the_configurations_load():
    config = str(ROOT / "examples/ilql/config")
    own = ["data.train_files=rows", "model.path=model"]
    ilql = load_config(ILQLConfig, broken_supervised_rules, own, "ilql", config)
    best = load_config(SFTConfig, broken_supervised_rules, own, "best", config)
    assert (ilql.training.gamma, ilql.trainer.device, best.data) == (1.0, "cpu", ilql.data)


@pytest.mark.proof
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_ilql_writes_nearly_optimal_walks_where_behaviour_cloning_writes_random_ones(
    tmp_path: Path, record_property: Callable[[str, object], None]
):
    for name in ("verl_like", "examples", "scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv").symlink_to((ROOT / ".venv").resolve())
    command = ["bash", "examples/ilql/run.sh"]
    subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True,
        timeout=1700,
    )
    rows = [scores(tmp_path / f"outputs/verl_like_example_ilql/{seed}") for seed in (1, 2, 3)]
    results = [", ".join(f"{name} {value:.2f}" for name, value in row.items()) for row in rows]
    record_property("result", "; ".join(results))
    for row in rows:
        assert row["ILQL"] > 0.95 * row["optimum"]
        assert row["cloned"] == pytest.approx(row["logged"], abs=0.4)
        assert row["best tenth cloned"] < 0.6 * row["optimum"]
