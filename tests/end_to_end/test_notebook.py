"""The notebook of the examples runs, which is also the run of `train` on Ray."""

import json
import linecache
import re
import signal
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import ray
import torch
import yaml
from documented_metrics import undocumented

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples/notebooks/grpo_from_python.ipynb").read_text())


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def execute(cells: list[str]) -> dict[str, Any]:
    """Runs cells one after the other, as a kernel does; returns the variables that they leave."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(cells, 1):
        name = f"cell {number}"
        # From there Python knows the source of what a cell defines.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), variables)  # noqa: S102
    return variables


def test_the_notebook_has_no_results_of_a_machine():
    for cell in NOTEBOOK["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


@pytest.mark.ray
@pytest.mark.parametrize("num_steps", [4, pytest.param(40, marks=pytest.mark.proof)])
def test_the_notebook_trains_its_own_model_with_its_own_function(
    num_steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The notebook has 40 steps, in which the model learns."""
    cells = code_cells()
    for key, value in (("total_training_steps", num_steps), ("test_freq", num_steps // 2)):
        (number,) = [i for i, cell in enumerate(cells) if f"trainer.{key}=" in cell]
        cells[number] = re.sub(rf"(?<=trainer\.{key}=)\d+", str(value), cells[number])
    assert (cells == code_cells()) == (num_steps == 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    before = signal.getsignal(signal.SIGTERM)
    variables = execute(cells)
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == before

    # A digit is followed by a larger one at fewer than half of the places by chance.
    scores = variables["scores"]
    assert variables["steps"] == list(range(1, num_steps + 1))
    assert mean(scores[:3]) < 0.4
    assert num_steps < 40 or mean(scores[-3:]) > 0.7
    run = variables["run"]
    assert not undocumented({name for row in run.metrics for name in row} - {"step"})
    assert {row["step"] for row in run.generations} == {0, num_steps // 2, num_steps}
    assert str(run.generations[-1]) in capsys.readouterr().out

    assert run.run_dir.parent == tmp_path / "outputs/notebook/runs"
    assert (run.run_dir / "report.html").is_file()
    assert run.checkpoint == run.run_dir / f"global_step_{num_steps}"
    weights = variables["model"].lm_head.weight
    assert not torch.equal(variables["trained"].lm_head.weight, weights)
    recorded = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    began_with = Path(recorded["actor_rollout_ref"]["model"]["path"])
    read = type(variables["model"]).from_pretrained(began_with)
    assert torch.equal(read.lm_head.weight, weights)
    assert "next_digit" in Path(recorded["custom_reward_function"]["path"]).read_text()
