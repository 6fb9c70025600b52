"""A custom role with a state of its own is continued with it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_local_step import run_locally
from test_resume import GRPO, numbers_of, run_until

# Scores the responses of a step by how many steps it has judged.
COUNTING_JUDGE = """
import json
from pathlib import Path

import torch
from verl_like.algorithms.masked import on_last_token
from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.worker import Worker


class Judge(Worker):
    reward_columns = {"judged": 0.5}

    def __init__(self, config):
        self.num_judged = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=["response_mask"], writes=["judged"])
    def annotate(self, data):
        self.num_judged += 1
        scores_B = torch.full((len(data),), float(self.num_judged))
        return DataProto.from_dict(tensors={"judged": on_last_token(scores_B, data.batch["response_mask"])})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path):
        Path(path).mkdir(parents=True)
        Path(path, "judged.json").write_text(json.dumps(self.num_judged))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path):
        self.num_judged = json.loads(Path(path, "judged.json").read_text())
"""


def test_a_role_goes_on_with_the_state_that_it_saved(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "counting_judge.py").write_text(COUNTING_JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    settings = [
        *GRPO,
        "worker_classes.judge=counting_judge.Judge",
        "role_mapping.judge=global_pool",
    ]
    settings += ["trainer.test_freq=-1", "trainer.val_before_train=false"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_locally(whole, tiny_llama, *settings, steps=3)
    run_until(2, parts, tiny_llama, *settings, steps=3)
    run_locally(parts, tiny_llama, *settings, steps=3)
    assert numbers_of(parts) == numbers_of(whole)
    checkpoint = parts / "runs/latest/global_step_3"
    assert json.loads((checkpoint / "judge/checkpoint/judged.json").read_text()) == 3
    assert (
        "judge/checkpoint/judged.json"
        in json.loads((checkpoint / "manifest.json").read_text())["files"]
    )
