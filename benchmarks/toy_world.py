"""The toy world of the examples, on which `detached_toy`, `python_way` and `resume` train."""

import runpy
import shutil
import subprocess
import sys

from benchmarks.harness import IS_SMALL, ROOT

SCRIPT = ROOT / "examples" / "split_placement" / "make_toy_world.py"
FOLDER = ROOT / "build" / "benchmarks" / "toy_world" if IS_SMALL else ROOT / ".toy_world"


def make() -> list[str]:
    """Makes the world if there is none; returns the overrides that name its files.

    The model of a small benchmark is not warmed up, and transformers generates, which starts sooner
    than vLLM.
    """
    if IS_SMALL:
        toy = runpy.run_path(str(SCRIPT))
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        toy["write_inputs"](FOLDER, toy["Settings"]())
    else:
        subprocess.run(
            [sys.executable, str(SCRIPT), "--out", str(FOLDER)], check=True, cwd=ROOT, timeout=900
        )
    files = [
        f"data.train_files={FOLDER}/train.parquet",
        f"data.val_files={FOLDER}/test.parquet",
        f"actor_rollout_ref.model.path={FOLDER}/model",
    ]
    return [*files, "actor_rollout_ref.rollout.name=hf"] if IS_SMALL else files
