"""A run that ended is continued as if it had not, in one process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import metrics_of
from safetensors.torch import load_file
from test_local_step import local_trainer, run_locally

from verl_like.trainer.resume import find_run

ADAPTIVE = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "trainer.save_freq=1"]


def numbers_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step without its times."""
    return [
        {name: v for name, v in row.items() if not name.startswith(("timing_s/", "perf/")) and "/perf/" not in name}
        for row in metrics_of(folder)
    ]


def test_a_run_that_goes_on_after_a_step_equals_one_that_did_not_end(tmp_path: Path, tiny_llama: Callable):
    run_locally(tmp_path / "whole", tiny_llama, *ADAPTIVE, steps=4)
    run_locally(tmp_path / "parts", tiny_llama, *ADAPTIVE, steps=2)
    run_locally(tmp_path / "parts", tiny_llama, *ADAPTIVE, steps=4)
    assert numbers_of(tmp_path / "parts") == numbers_of(tmp_path / "whole")
    assert len(list((tmp_path / "parts/runs").glob("2*"))) == 1
