"""Modules outside the package add one of each kind through `plugins`; a run with all equals the built-in one."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import data_row, metrics_of
from test_local_step import run_locally

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer import ppo_trainer
from verl_like.workers import rollout

REWARDS = """
from verl_like.rewards import register_reward


@register_reward("source/of_plugin")
def share_of_distinct_characters(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(set(solution_str)) / 4, "acc": float("1" in solution_str)}
"""
# The loss has verl's form: it reads the configuration, divides by its counts, and returns numbers as metrics.
OTHERS = """
import torch

from verl_like.algorithms import masked as verl_F
from verl_like.algorithms.advantages import AdvantageOptions, register_adv_est
from verl_like.algorithms.aggregation import agg_loss
from verl_like.algorithms.policy_losses import register_policy_loss
from verl_like.trainer.ppo_trainer import RayPPOTrainer, register_trainer
from verl_like.workers.rollout import register_rollout_engine
from verl_like.workers.rollout.hf_engine import HfEngine


class CentredOptions(AdvantageOptions):
    scale: float = 7.0


@register_adv_est("centred_by_plugin")
def centred(token_level_rewards, response_mask, index, options: CentredOptions, config=None):
    scores = token_level_rewards.sum(-1)
    mean = torch.stack([scores[[other == own for other in index]].mean() for own in index])
    advantages = options.scale * (scores - mean).unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss("form_of_verl")
def ppo_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    assert config is not None
    clip_ratio = config.clip_ratio
    low = config.clip_ratio_low if config.clip_ratio_low is not None else clip_ratio
    high = config.clip_ratio_high if config.clip_ratio_high is not None else clip_ratio
    negative_approx_kl = log_prob - old_log_prob
    ratio = torch.exp(negative_approx_kl)
    first, second = -advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    pg_losses = torch.maximum(first, second)
    loss = agg_loss(
        loss_mat=pg_losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    clipfrac = verl_F.masked_mean(torch.gt(second, first).float(), response_mask)
    kl = verl_F.masked_mean(-negative_approx_kl, response_mask)
    return loss, {"actor/pg_clipfrac": clipfrac.detach().item(), "actor/ppo_kl": kl.detach()}


@register_rollout_engine("engine_of_plugin")
class EngineOfPlugin(HfEngine):
    pass


@register_trainer
class TrainerOfPlugin(RayPPOTrainer):
    pass
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two modules in one package, so that the reward processes of the run need no torch."""
    package = tmp_path / "of_a_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text(REWARDS)
    (package / "others.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(rollout, "_ENGINES", dict(rollout._ENGINES))
    monkeypatch.setattr(ppo_trainer, "_TRAINERS", list(ppo_trainer._TRAINERS))
    yield "plugins=[of_a_user.rewards,of_a_user.others]"
    del ADVANTAGE_ESTIMATORS.functions["centred_by_plugin"], POLICY_LOSSES.functions["form_of_verl"]


def test_a_run_whose_parts_come_from_plugins_equals_the_built_in_one(
    tmp_path: Path, tiny_llama: Callable, plugins: str
):
    settings = ["trainer.val_before_train=false", "trainer.test_freq=-1", "actor_rollout_ref.actor.clip_ratio=0.05"]
    settings += ["actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.optim.lr=1e-2"]
    built_in = ["algorithm.adv_estimator=dr_grpo", "actor_rollout_ref.actor.clip_ratio_c=1000.0"]
    run_locally(tmp_path / "built_in", tiny_llama, *settings, *built_in)
    (tmp_path / "plugin.jsonl").write_text(
        "\n".join(
            json.dumps(data_row(i, f"{i}+{i + 1}", str(2 * i + 1)) | {"data_source": "source/of_plugin"})
            for i in range(8)
        )
    )
    of_plugins = [
        plugins,
        "algorithm.adv_estimator=centred_by_plugin",
        "algorithm.options.scale=1.0",
        "actor_rollout_ref.actor.policy_loss.loss_mode=form_of_verl",
        "actor_rollout_ref.rollout.name=engine_of_plugin",
        "custom_reward_function.path=null",
        *(f"data.{part}_files={tmp_path}/plugin.jsonl" for part in ("train", "val")),
    ]
    run_locally(tmp_path / "plugin", tiny_llama, *settings, *of_plugins)
    assert ppo_trainer.get_trainer().__name__ == "TrainerOfPlugin"
    for expected, step in zip(metrics_of(tmp_path / "built_in"), metrics_of(tmp_path / "plugin"), strict=True):
        names = [name for name in step if name.startswith(("actor/", "critic/")) and "/perf/" not in name]
        assert {"actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/score/mean"} <= set(names)
        assert {name: step[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-5, abs=1e-7
        )
        assert step["actor/pg_clipfrac"] > 0 and step["actor/grad_norm"] > 0


def test_the_process_of_a_worker_imports_the_plugins_before_it_makes_the_worker(tmp_path: Path):
    (tmp_path / "seen_by_worker.py").write_text("SEEN = True\n")
    built = ClassWithInitArgs(dict, size=3)
    built.plugins = ("seen_by_worker",)
    program = (
        "import pickle, sys\nsys.path.insert(0, sys.argv[1])\n"
        "worker = pickle.loads(bytes.fromhex(sys.argv[2]))()\n"
        "assert worker == {'size': 3} and sys.modules['seen_by_worker'].SEEN\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path), pickle.dumps(built).hex()], check=True, timeout=60)
