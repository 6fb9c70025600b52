"""A user's package that adds one of each kind through `plugins`; reports without charts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.rewards import registry
from verl_like.trainer.ppo import ray_trainer as ppo_trainer
from verl_like.trainer.run import charts, report
from verl_like.workers import rollout

CHARTS = ("chart", "heat_map", "histogram", "timelines")

REWARDS = """
from verl_like.rewards import register_reward


@register_reward("source/of_plugin")
def share_of_distinct_characters(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(set(solution_str)) / 4, "acc": float("1" in solution_str)}
"""
# The loss has verl's form: it reads the configuration, divides by its counts, and returns numbers
# as metrics. The trainer's maker halves what the estimator doubles by its option.
OTHERS = """
import torch

from verl_like.algorithms import masked as verl_F
from verl_like.algorithms.advantages import AdvantageOptions, register_adv_est
from verl_like.algorithms.aggregation import agg_loss
from verl_like.algorithms.policy_losses import register_policy_loss
from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, register_trainer
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


class HalvingMaker(ExperienceMaker):
    def estimate(self, corrected):
        estimated = super().estimate(corrected)
        columns = estimated.batch.batch
        return estimated.with_columns({name: columns[name] / 2 for name in ("advantages", "returns")})


@register_trainer
class TrainerOfPlugin(RayPPOTrainer):
    def build_maker(self):
        return HalvingMaker(**vars(super().build_maker()))
"""


@pytest.fixture(scope="module", autouse=True)
def reports_without_charts() -> Iterator[None]:
    """Runs of this process write a whole report but for its charts: to draw them takes longer than
    the steps of a tiny run. A test that looks at them takes `drawn_charts`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CHARTS:
            patch.setattr(report, name, lambda *_, **__: "")
        yield


@pytest.fixture
def drawn_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHARTS:
        monkeypatch.setattr(report, name, getattr(charts, name))


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The key with two modules; what they register is forgotten after the test."""
    package = tmp_path / "of_a_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text(REWARDS)
    (package / "others.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(registry.REWARD_FNS, "entries", dict(registry.REWARD_FNS.entries))
    monkeypatch.setattr(rollout.ENGINES, "entries", dict(rollout.ENGINES.entries))
    monkeypatch.setattr(ppo_trainer.TRAINERS, "entries", dict(ppo_trainer.TRAINERS.entries))
    yield "plugins=[of_a_user.rewards,of_a_user.others]"
    for module in [name for name in sys.modules if name.startswith("of_a_user")]:
        del sys.modules[module]
    del ADVANTAGE_ESTIMATORS.entries["centred_by_plugin"], POLICY_LOSSES.entries["form_of_verl"]
