"""The table "Where a change goes" of AGENTS.md is true: a copy of the tree gets one of each kind,
and a step uses them.

Files are added and touched only where the table says. What needs Ray has its test elsewhere.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ESTIMATOR = '''
"""A quarter of the response's reward, or another share of it."""

import torch

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.advantages.share_of_reward_options import ShareOptions


@register_adv_est("share_of_reward")
def compute_share_of_reward(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, options: ShareOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = options.share * token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages
'''
ESTIMATOR_OPTIONS = '''
"""The options of `share_of_reward`."""

from verl_like.algorithms.advantages import AdvantageOptions


class ShareOptions(AdvantageOptions):
    """How much of the reward."""

    share: float = 1.0
    """Factor of the reward."""
'''
LOSS = '''
"""Twice the policy gradient."""

from typing import Any

import torch

from verl_like.algorithms.aggregation import agg_loss
from verl_like.algorithms.policy_losses import register_policy_loss


@register_policy_loss("doubled")
def compute_policy_loss_doubled(
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses = -2 * advantages * rollout_is_weights * (log_prob - log_prob.detach()).exp()
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
'''
CORRECTION = '''
"""Importance weights times a constant."""

import torch


def scaled(weights: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * weights
'''
ROLE = '''
"""A judge that gives every response 1."""

from typing import Any, ClassVar

import torch

from verl_like.algorithms.masked import on_last_token
from verl_like.protocol import DataProto
from verl_like.single_controller import Dispatch, register
from verl_like.single_controller.worker import Worker


class Judge(Worker):
    reward_columns: ClassVar = {"judge_scores": 0.5}

    def __init__(self, config: Any) -> None:
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=["response_mask"], writes=["judge_scores"])
    def annotate(self, data: DataProto) -> DataProto:
        mask_BR = data.batch["response_mask"]
        return DataProto.from_dict(tensors={"judge_scores": on_last_token(torch.ones(len(mask_BR)), mask_BR)})
'''
ENGINE = '''
"""An engine that gives all requests the same seed."""

import dataclasses
from collections.abc import Sequence

from verl_like.workers.rollout.hf_engine import HfEngine
from verl_like.workers.rollout.request import GenerationRequest


class EqualEngine(HfEngine):
    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        super()._submit([dataclasses.replace(request, seed=11) for request in requests])
'''
REWARD = '''
"""Two for every response."""

from typing import Any

from verl_like.rewards.registry import register_reward


@register_reward("added_source")
def compute_score(**arguments: Any) -> float:
    return 2.0
'''
STEP = """
import json

import torch
from runs import data_row
from test_local_step import local_trainer

from verl_like.protocol import metric_values
from verl_like.protocol.padded import padded


def test_a_step_uses_all_that_was_added(tmp_path, tiny_llama):
    rows = [json.dumps(data_row(i, f"{i}+1") | {"data_source": "added_source"}) for i in range(8)]
    (tmp_path / "added.jsonl").write_text("\\n".join(rows))
    settings = [
        *(f"data.{part}_files={tmp_path}/added.jsonl" for part in ("train", "val")),
        "custom_reward_function.path=null",
        "algorithm.adv_estimator=share_of_reward", "algorithm.options.share=0.25",
        "actor_rollout_ref.actor.policy_loss.loss_mode=doubled",
        "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_scale=3.0",
        "actor_rollout_ref.rollout.name=equal",
        "worker_classes.judge=added_role.Judge", "role_mapping.judge=global_pool",
    ]
    with local_trainer(tmp_path, tiny_llama, *settings) as trainer:
        prompts = trainer.next_prompts()
        prompts.meta_info["global_steps"] = 1
        experience = trainer.maker.make(prompts)
        metrics = metric_values(trainer.learner.learn(experience).get())
    columns = padded(experience.batch).batch
    mask = columns["response_mask"]
    assert torch.equal(columns["responses"][::2], columns["responses"][1::2])  # the engine
    assert columns["token_level_scores"].sum(-1).tolist() == [2 + 0.5] * 8  # the rule and the role
    assert torch.equal(columns["advantages"], 0.25 * 2.5 * mask)  # the estimator
    # The correction and its key; both sides of the ratio have the same weights.
    torch.testing.assert_close(columns["rollout_is_weights"], 3.0 * mask, rtol=1e-4, atol=0)
    torch.testing.assert_close(metrics["actor/pg_loss"], -2 * 3 * 0.625, rtol=1e-4, atol=0)  # the loss
"""

# By row of the table: new files, and what is inserted into a file after a text that is there.
NEW = {
    "advantage estimator or loss": {
        "verl_like/algorithms/advantages/share_of_reward.py": ESTIMATOR,
        "verl_like/algorithms/advantages/share_of_reward_options.py": ESTIMATOR_OPTIONS,
        "verl_like/algorithms/policy_losses/doubled.py": LOSS,
    },
    "correction": {"verl_like/algorithms/corrections/scaling.py": CORRECTION},
    "role": {"tests/end_to_end/added_role.py": ROLE},
    "rollout engine": {"verl_like/workers/rollout/equal_engine.py": ENGINE},
    "rule reward": {"verl_like/rewards/constant.py": REWARD},
    "configuration key": {},
}
TOUCHED = {
    "advantage estimator or loss": [
        (
            "verl_like/algorithms/advantages/_facts.py",
            "FACTS = {\n",
            '    "share_of_reward": AlgorithmFacts(_REWARDS),\n',
        ),
        (
            "verl_like/algorithms/policy_losses/_facts.py",
            "FACTS = {\n",
            '    "doubled": AlgorithmFacts(_OF_DOUBLED),\n',
        ),
        (
            "verl_like/algorithms/policy_losses/_facts.py",
            '_OF_RESPONSES = "seq-mean-token-mean"\n',
            '_OF_DOUBLED = frozenset({"log_prob", "advantages", "response_mask"})\n'
            '_OF_DOUBLED |= {"loss_agg_mode", "rollout_is_weights"}\n',
        ),
    ],
    "correction": [
        (
            "verl_like/algorithms/corrections/correction.py",
            "from verl_like.algorithms.corrections.rejection import "
            "compute_rollout_rejection_mask\n",
            "from verl_like.algorithms.corrections.scaling import scaled\n",
        ),
        (
            "verl_like/algorithms/corrections/correction.py",
            "        metrics |= of_weights\n",
            "        weights = scaled(weights, config.rollout_is_scale)\n",
        ),
    ],
    "rollout engine": [
        (
            "verl_like/workers/rollout/__init__.py",
            "from verl_like.workers.rollout.hf_engine import HfEngine\n",
            "from verl_like.workers.rollout.equal_engine import EqualEngine\n",
        ),
        (
            "verl_like/workers/rollout/__init__.py",
            '    {"hf": HfEngine, ',
            '"equal": EqualEngine, ',
        ),
    ],
    "rule reward": [
        ("verl_like/rewards/__init__.py", "from verl_like.rewards import ", "constant, ")
    ],
    "configuration key": [
        (
            "verl_like/algorithms/corrections/__init__.py",
            '    """Divide the weights by their mean over the batch."""\n',
            '    rollout_is_scale: float = 1.0\n    """Factor of the weights."""\n',
        ),
        (
            "tests/oracle/step_table.py",
            '        *(f"reward.overlong_buffer.{name}" for name in ("enable", "len", '
            '"penalty_factor")),\n',
            '        "algorithm.rollout_correction.rollout_is_scale",\n',
        ),
    ],
}
TESTED_ELSEWHERE = {
    "dispatch mode": "ray_cpu/test_ray_dispatch.py::test_a_registered_mode_of_the_user_is_used",
    "estimator, loss, engine, reward or trainer outside the package": "end_to_end/test_plugins.py::"
    "test_a_run_whose_parts_come_from_plugins_equals_the_built_in_one",
    "trainer": "end_to_end/test_run_shell.py::test_a_trainer_of_a_few_lines_trains_and_leaves_metrics_and_a_report",
    "placement": "ray_cpu/test_ray_flow.py::"
    "test_colocated_split_and_local_runs_of_one_flow_give_equal_results",
}
RULES_FOR_KEYS = [
    "tests/architecture/test_config_surface.py::test_every_key_is_documented",
    "tests/architecture/test_config_surface.py::test_every_key_is_read_somewhere",
    "tests/oracle/test_step_numbers.py::test_every_key_has_its_place_in_the_table",
]


def table() -> dict[str, tuple[str, str]]:
    """What is new and what is touched, by the change."""
    lines = (
        (ROOT / "AGENTS.md")
        .read_text()
        .partition("**Where a change goes**")[2]
        .strip()
        .splitlines()
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return {change: (new, touched) for change, new, touched in rows[2:]}


def paths_in(cell: str) -> list[str]:
    """The files and folders that a cell names, from the root of the tree; those of the package are
    named from there."""
    names = re.findall(r"`([\w./]*/[\w./]*)`", cell)
    return [f"verl_like/{name}" if (ROOT / "verl_like" / name).exists() else name for name in names]


def test_every_row_of_the_table_has_a_test():
    assert {*NEW, *TESTED_ELSEWHERE} == table().keys()
    for place in TESTED_ELSEWHERE.values():
        file, _, name = place.partition("::")
        tests = [
            node
            for node in ast.parse((ROOT / "tests" / file).read_text()).body
            if hasattr(node, "name")
        ]
        (test,) = [node for node in tests if node.name == name]
        assert not any("proof" in ast.unparse(decorator) for decorator in test.decorator_list)


def test_what_is_added_stands_where_the_table_says_and_touches_nothing_else():
    for change, new_files in NEW.items():
        new, touched = table()[change]
        in_package = [path for path in new_files if path.startswith("verl_like/")]
        assert {str(Path(path).parent) for path in in_package} == {
            path.rstrip("/") for path in paths_in(new)
        }
        edited = {path for path, _, _ in TOUCHED.get(change, [])}
        if change == "configuration key":
            # The model that the new field is of
            edited.remove("verl_like/algorithms/corrections/__init__.py")
        assert edited == set(paths_in(touched))


@pytest.mark.proof
def test_a_tree_with_one_more_of_each_kind_uses_them_all(tmp_path: Path):
    tree = tmp_path / "tree"
    for folder in ("verl_like", "examples", "docs", "tests"):
        shutil.copytree(ROOT / folder, tree / folder)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for path, text in [item for files in NEW.values() for item in files.items()]:
        assert not (tree / path).exists()
        (tree / path).write_text(text.lstrip())
    for path, before, text in [edit for edits in TOUCHED.values() for edit in edits]:
        source = (tree / path).read_text()
        assert source.count(before) == 1, f"{path} has changed: {before}"
        (tree / path).write_text(source.replace(before, before + text))
    (tree / "tests/end_to_end/test_added.py").write_text(STEP)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/end_to_end/test_added.py",
        ]
        + RULES_FOR_KEYS,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
