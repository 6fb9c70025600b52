"""Samples of several rows, such as the turns of an agent: what the maker makes of them, by hand."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from verl_like.algorithms.kl import FixedKLController
from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.single_controller import Dispatch, register
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.worker import Worker
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.experience_maker import Experience, ExperienceMaker, Generated
from verl_like.workers.planning.flops import ModelCost

# Two samples of prompt a, the first of which has two rows, and two of prompt b, the second of which
# has two rows. A tool wrote the middle token of the last row.
UIDS = ["a", "a", "a", "b", "b", "b"]
SAMPLE_ID = [4, 4, 3, 2, 8, 8]
MASK = [[1, 1], [1], [1, 1], [1], [1], [1, 0, 1]]
SCORES = [[0.0, 0.25], [0.75], [0.0, 0.0], [3.0], [-1.0], [0.0, 0.0, 2.0]]
COMPUTE = {"dispatch_mode": Dispatch.DP_COMPUTE_PROTO, "blocking": False}


class Models(Worker):
    """An actor and a reward that gives each row its own."""

    @register(**COMPUTE, reads=["rollout_log_probs"], writes=["old_log_probs"], jagged=True)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"old_log_probs": data.batch["rollout_log_probs"] + data.batch["rollout_log_probs"]}
        )

    @register(**COMPUTE, reads=["scores_to_give"], writes=["scores"])
    def annotate(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"scores": data.batch["scores_to_give"]})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None: ...


def generated() -> DataProto:
    """The rows above as a rollout of several turns returns them."""
    mask = jagged_from_lists(MASK, torch.int64)
    columns = {
        "prompts": jagged_from_lists(
            [[1], [1, 1, 1, 1], [1], [1, 1], [1, 1], [1, 1, 1]], torch.int64
        ),
        "responses": torch.ones_like(mask),
        "response_mask": mask,
        "rollout_log_probs": torch.full_like(mask, -0.5, dtype=torch.float32),
        "scores_to_give": jagged_from_lists(SCORES, torch.float32),
        "sample_id": torch.tensor(SAMPLE_ID),
    }
    meta_info = {"global_steps": 3, "padding": (4, 3, 0)}
    return DataProto.from_dict(columns, {"uid": np.array(UIDS, dtype=object)}, meta_info)


def maker_of(*settings: str) -> ExperienceMaker:
    group = LocalWorkerGroup(RayClassWithInitArgs(Models))
    config = load_ppo_config(
        [
            "data.train_files=a",
            "data.val_files=b",
            "actor_rollout_ref.model.path=c",
            "actor_rollout_ref.rollout.n=2",
            "algorithm.adv_estimator=grpo",
            "worker_classes.judge=own.Models",
            "role_mapping.judge=global_pool",
            *settings,
        ]
    )
    return ExperienceMaker(
        config=config,
        groups={"rollout": group, "actor": group, "judge": group},
        rule_scorer=None,
        reward_columns={"scores": 1.0},
        kl_controller=FixedKLController(0.0),
        model_cost=ModelCost(1.0, 0.0, ()),
        timer=lambda phase: contextlib.nullcontext(),
    )


def experience(*settings: str, batch: DataProto | None = None) -> Experience:
    return maker_of(*settings).complete(Generated(batch or generated(), None, {}))


def rows_of(made: Experience, name: str) -> list[list[float]]:
    return [row.tolist() for row in made.batch.batch[name].unbind()]


@pytest.mark.parametrize("norm_by_std", [False, True])
def test_grpo_compares_the_sums_of_samples_and_gives_all_their_tokens_one_advantage(
    norm_by_std: bool,
):
    made = experience(f"algorithm.norm_adv_by_std_in_grpo={norm_by_std}")
    # a: 0.25 + 0.75 and 0 have mean 1/2 and deviate by 1/2, std 1 / sqrt(2). b: 3 and -1 + 2 have
    # mean 2 and deviate by 1, std sqrt(2). Counted by rows, the means would be 1/3 and 4/3.
    a, b = (0.5 / (0.5**0.5 + 1e-6), 1 / (2**0.5 + 1e-6)) if norm_by_std else (0.5, 1.0)
    expected = [[a, a], [a], [-a, -a], [b], [-b], [-b, 0, -b]]
    for name in ("advantages", "returns"):
        assert [pytest.approx(row) for row in expected] == rows_of(made, name)
    assert rows_of(made, "token_level_rewards") == rows_of(made, "token_level_scores") == SCORES
    assert rows_of(made, "response_mask") == MASK


def test_a_samples_rows_stay_as_they_were():
    made, before = experience(), generated()
    assert made.work.sample_starts.tolist() == [0, 2, 3, 4, 6]
    assert made.work.tokens_B.tolist() == [3, 5, 3, 3, 3, 6]
    assert (
        made.batch.batch["sample_id"].tolist() == SAMPLE_ID
        and made.batch.non_tensor_batch["uid"].tolist() == UIDS
    )
    assert made.batch.meta_info["padding"] == (4, 3, 0)
    for name in ("prompts", "responses", "response_mask", "rollout_log_probs"):
        assert rows_of(made, name) == [row.tolist() for row in before.batch[name].unbind()]
    assert rows_of(made, "old_log_probs") == [[-1.0] * len(row) for row in MASK]


def test_a_sample_that_is_skipped_is_skipped_with_all_its_rows():
    batch = generated()
    batch.batch["is_skipped"] = torch.tensor([True, True, False, False, False, False])
    made = experience("algorithm.norm_adv_by_std_in_grpo=false", batch=batch)
    assert rows_of(made, "response_mask") == [[0, 0], [0], *MASK[2:]]
    # The other sample of its prompt has nothing to compare with.
    assert rows_of(made, "advantages") == [[0, 0], [0], [0, 0], [1], [-1], [-1, 0, -1]]
    assert made.batch.batch["is_skipped"].tolist() == [True, True, False, False, False, False]


def test_a_correction_weighs_and_rejects_a_sample_as_a_whole():
    # The trainer's probability over the rollout's is exp(-1/2) for every token: their product for
    # the tokens that count is exp(-n / 2), of n = 3, 2, 1 and 3 tokens. Of k1 = n / 2 at most 1.2
    # is allowed.
    correction = "algorithm.rollout_correction"
    settings = [f"{correction}.rollout_is=sequence", f"{correction}.rollout_is_threshold=2"]
    settings += [f"{correction}.rollout_rs=seq_sum_k2", f"{correction}.rollout_rs_threshold=0.3"]
    made = experience(*settings)
    weights = [[np.exp(-n / 2)] * len(row) for n, row in zip([3, 3, 2, 1, 3, 3], MASK, strict=True)]
    weights[5][1] = 0
    assert [pytest.approx(row) for row in weights] == rows_of(made, "rollout_is_weights")
    # k2 is a half of the squared log-ratio, 1/8 for each token: 3/8, 2/8, 1/8 and 3/8.
    assert rows_of(made, "response_mask") == [[0, 0], [0], [1, 1], [1], [0], [0, 0, 0]]
    assert rows_of(made, "sampled_mask") == MASK
    assert metric_values(made.metrics)["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5


def test_no_phase_writes_into_the_value_that_it_gets():
    """Every phase, with a correction that takes tokens away, under a loss that picks some."""
    correction = "algorithm.rollout_correction"
    settings = [f"{correction}.rollout_is=sequence", f"{correction}.rollout_rs=seq_sum_k2"]
    settings += [
        f"{correction}.rollout_rs_threshold=0.3",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
    ]
    maker = maker_of(*settings)
    values: list[Any] = [Generated(generated(), None, {})]
    seen = [look(values[0].batch)]
    for phase in (maker.score, maker.reward, maker.correct, maker.estimate, maker.choose_tokens):
        values.append(phase(values[-1]))
        seen.append(look(values[-1].batch))
    assert [look(value.batch) for value in values] == seen
    added = [seen[k + 1][0].keys() - seen[k][0].keys() for k in range(1, 5)]
    assert added[0] == {"token_level_scores", "token_level_rewards"} and added[1] == {
        "rollout_is_weights"
    }
    assert added[2] == {"advantages", "returns"} and added[3] == {"sampled_mask", "selected_tokens"}
    with pytest.raises(AttributeError):
        values[-1].metrics = {}


def look(batch: DataProto) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns by name as lists, and the meta_info."""
    names = sorted(batch.batch.keys())
    return {name: [row.tolist() for row in batch.batch[name].unbind()] for name in names}, dict(
        batch.meta_info
    )


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("compute_rewards", "reward"),
        ("correct_rollout", "correct"),
        ("compute_advantages", "estimate"),
    ],
)
def test_a_maker_whose_phase_writes_into_its_batch_is_refused_with_the_phase_that_takes_its_place(
    before: str, now: str
):
    with pytest.raises(
        ValueError, match=rf"OldMaker has a method {before}, .*: override {now}\(scored\)"
    ):
        type("OldMaker", (ExperienceMaker,), {before: lambda self, batch: None})
    mixin = type("OldPhase", (), {before: lambda self, batch: None})
    with pytest.raises(ValueError, match=rf"MixedMaker has a method {before}, "):
        type("MixedMaker", (mixin, ExperienceMaker), {})


def test_responses_as_a_tuple_are_refused_by_the_name_of_the_class_that_takes_its_place():
    with pytest.raises(
        ValueError, match=r"returned a tuple: return Generated\(batch, scores, metrics\)"
    ):
        maker_of().complete((generated(), None, {}))
    with pytest.raises(
        ValueError, match="is no tuple, but a Generated: read its batch, scores and metrics"
    ):
        _, _, _ = Generated(generated(), None, {})
