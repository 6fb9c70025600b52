"""A maker whose rollout disagrees with its trainer: weights, masks, selected tokens and metrics, by
hand."""

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from verl_like.algorithms.kl import FixedKLController
from verl_like.protocol import DataProto, Metric, merge_metrics, metric_values
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.single_controller import Dispatch, register
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.worker import Worker
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.experience_maker import Experience, ExperienceMaker
from verl_like.trainer.ppo.metrics import batch_metrics
from verl_like.workers.planning.flops import ModelCost

# Two responses to each of two prompts. The trainer's probability over the rollout's, 1/2 for every
# token.
RATIOS = torch.tensor([[1.5, 1.0, 0.5], [1.8, 0.5, 1.0], [0.25, 0.25, 1.0], [1.0, 1.0, 1.0]])
# A tool wrote the middle token of the last one.
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 0, 1]])
ATTENDED = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 1]])
SCORES = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
COMPUTE = {"dispatch_mode": Dispatch.DP_COMPUTE_PROTO, "blocking": False}


class Models(Worker):
    """A rollout, an actor and a reward whose answers are known."""

    @register(**COMPUTE)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        attention_mask = torch.cat([torch.ones(4, 2, dtype=torch.long), ATTENDED], dim=1)
        rollout_log_probs = torch.full((4, 3), math.log(0.5))
        columns = {
            "response_mask": MASK,
            "attention_mask": attention_mask,
            "rollout_log_probs": rollout_log_probs,
        }
        columns |= {"input_ids": attention_mask, "responses": ATTENDED}
        return DataProto.from_dict(tensors=columns)

    @register(**COMPUTE, reads=["rollout_log_probs"], writes=["old_log_probs"])
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            tensors={"old_log_probs": data.batch["rollout_log_probs"] + RATIOS.log()}
        )

    @register(**COMPUTE, reads=["rollout_log_probs"], writes=["ref_log_prob"])
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"ref_log_prob": data.batch["rollout_log_probs"]})

    @register(**COMPUTE, reads=["response_mask"], writes=["scores"])
    def annotate(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"scores": SCORES})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None: ...


def experience(*settings: str, **correction: Any) -> Experience:
    group = LocalWorkerGroup(RayClassWithInitArgs(Models))
    corrections = [
        f"algorithm.rollout_correction.{key}={json.dumps(value)}"
        for key, value in correction.items()
    ]
    config = load_ppo_config(
        [
            "data.train_files=a",
            "data.val_files=b",
            "actor_rollout_ref.model.path=c",
            "actor_rollout_ref.rollout.n=2",
            "algorithm.adv_estimator=grpo",
            "algorithm.norm_adv_by_std_in_grpo=false",
            "trainer.balance_batch=false",
            "worker_classes.judge=own.Models",
            "role_mapping.judge=global_pool",
            *settings,
            *corrections,
        ]
    )
    groups = {"rollout": group, "actor": group, "judge": group}
    groups |= {"ref": group} if config.algorithm.use_kl_in_reward else {}
    maker = ExperienceMaker(
        config=config,
        groups=groups,
        rule_scorer=None,
        reward_columns={"scores": 1.0},
        kl_controller=FixedKLController(0.0),
        model_cost=ModelCost(1.0, 0.0, ()),
        timer=lambda phase: contextlib.nullcontext(),
    )
    prompts = DataProto.from_dict(
        tensors={"prompts": jagged_from_lists([[1, 1]] * 2, torch.int64)},
        non_tensors={"uid": np.array(["0-0", "0-1"], dtype=object)},
        meta_info={"global_steps": 3, "padding": (2, 3, 0)},
    )
    return maker.make(prompts)


def test_weights_and_the_narrower_mask_reach_the_losses_and_advantages_count_every_response():
    made = experience(
        rollout_is="token", rollout_is_threshold=1.25, rollout_rs="token_k1,seq_mean_k1",
        rollout_rs_threshold="0.5_1.9,0.6_1.6",
    )  # fmt: skip
    columns, metrics = padded(made.batch).batch, metric_values(made.metrics)
    weights = [[1.25, 1.0, 0.5], [1.25, 0, 0], [0.25, 0.25, 1.0], [1.0, 0, 1.0]]
    torch.testing.assert_close(columns["rollout_is_weights"], torch.tensor(weights))
    # The rollout's ratio 2 is above 1.9 in the first response's last token, where its reward is;
    # the second response's mean ratio 1 / 1.8 is below 0.6, that of the third, the cube root of 16,
    # is above 1.6.
    assert columns["response_mask"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 1]]
    assert columns["sampled_mask"].tolist() == MASK.tolist()
    advantages = torch.tensor([0.5, -0.5, 0.5, -0.5]).unsqueeze(-1) * MASK
    torch.testing.assert_close(columns["advantages"], advantages)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(7.5 / 9)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(2 / 9)
    squares = 2 * 1.25**2 + 4 + 0.25 + 2 * 0.0625
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(7.5**2 / 9 / squares)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(5 / 9)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(3 / 4)


def test_the_metrics_of_the_batch_count_what_was_sampled_and_show_the_drift_without_any_correction():
    settings = {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 0.1}
    plain, narrowed = experience(), experience(**settings)
    assert padded(narrowed.batch).batch["response_mask"].tolist() == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 0],
        [1, 0, 1],
    ]
    metrics = [metric_values(batch_metrics(made.batch, 2, 3)) for made in (plain, narrowed)]
    # The rollout's equal probabilities correlate with none
    assert metrics[0] == pytest.approx(metrics[1], nan_ok=True)
    assert metrics[0]["response_length/mean"] == 9 / 4
    assert metrics[0]["critic/score/mean"] == 0.5
    assert metrics[0]["rollout_corr/kl"] == pytest.approx(
        -math.log(1.5 * 0.5 * 1.8 / 16) / 9, rel=1e-5
    )
    assert metrics[0]["rollout_corr/drift_max"] == pytest.approx(math.log(4), rel=1e-5)


def test_bypass_takes_the_rollouts_log_probabilities_and_compares_nothing():
    made = experience(bypass_mode=True)
    columns = padded(made.batch).batch
    assert torch.equal(columns["old_log_probs"], columns["rollout_log_probs"])
    assert not {"rollout_is_weights", "sampled_mask"} & set(columns.keys())
    drift = [
        name
        for name in batch_metrics(made.batch, 2, 3)
        if name.startswith(("rollout_corr/", "training/"))
    ]
    assert not drift


def test_the_kl_of_several_batches_merges_by_their_scored_responses():
    names = [f"actor/reward_kl_penalty{suffix}" for suffix in ("", "_coeff")]
    metrics = experience("algorithm.use_kl_in_reward=true").metrics
    of_more_responses = {name: Metric.mean(1.0, weight=12) for name in names}
    merged = merge_metrics([metrics, of_more_responses])
    kl_B = [math.log(1.5 * 0.5) / 3, math.log(1.8), math.log(1 / 16) / 3, 0.0]
    assert [merged[name].value for name in names] == pytest.approx([(12 + sum(kl_B)) / 16, 12 / 16])


def test_a_loss_selects_among_the_tokens_that_are_left():
    # The first token of the first response has the largest covariance; then it is rejected.
    loss = "actor_rollout_ref.actor.policy_loss"
    settings = [f"{loss}.loss_mode=kl_cov", f"{loss}.kl_cov_ratio=0.2"]
    selected = padded(experience(*settings).batch).batch["selected_tokens"]
    assert selected.nonzero().tolist() == [[0, 0]]
    left = padded(
        experience(*settings, rollout_rs="token_k1", rollout_rs_threshold="0.7_5.0").batch
    ).batch
    assert left["response_mask"].tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 1]]
    assert left["selected_tokens"].nonzero().tolist() == [[0, 1]]
