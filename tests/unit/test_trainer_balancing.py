"""Which rows the ranks of a call get, on groups of this process."""

import numpy as np
import pytest
import torch

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.loop.balancing import RowWork
from verl_like.trainer.ppo.row_work import work_of_rows
from verl_like.workers.planning.flops import ModelCost

# 4 FLOPs a token, one for a scored token and 2 for a pair of tokens.
COST = ModelCost(per_token=4.0, per_scored_token=1.0, per_pair=((2.0, None),))
LENGTHS = [8, 8, 1, 1, 6, 2, 6, 2]


class Summing(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def work(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"sum": batch.batch["tokens"].sum().expand(len(batch))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def ranks(self, batch: DataProto) -> DataProto:
        numbers = batch.batch.get("mini_batch", torch.zeros(len(batch)))
        return DataProto.from_dict(
            tensors={"rank": torch.full((len(batch),), self.rank), "mini_batch": numbers}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def everything(self, batch: DataProto) -> int:
        return len(batch)


class Reading(Worker):
    """It reads one column alone."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=["tokens"], writes=["lengths"])
    def lengths(self, batch: DataProto) -> DataProto:
        raise AssertionError("the test calls nothing")


def rows_of(lengths: list[int], **further: torch.Tensor) -> DataProto:
    """Rows of these lengths, at most four tokens of which are the prompt, with the column
    `tokens`."""
    ones = [[1] * length for length in lengths]
    tensors = {"prompts": jagged_from_lists([row[:4] for row in ones], torch.int64)}
    tensors |= dict.fromkeys(
        ("responses", "response_mask"), jagged_from_lists([row[4:] for row in ones], torch.int64)
    )
    return DataProto.from_dict(
        {"tokens": torch.tensor(lengths), **tensors, **further}, meta_info={"padding": (4, 4, 0)}
    )


@pytest.fixture
def batch() -> DataProto:
    return rows_of(LENGTHS)


@pytest.fixture
def group() -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(Summing), world_size=2)


def tokens_of_ranks(group: LocalWorkerGroup, work: RowWork, batch: DataProto) -> list[int]:
    """For each row the tokens that its rank got."""
    return work.submit(group.work, batch).get().batch["sum"].tolist()


def test_work_is_counted_with_attention_and_the_head_of_the_response(batch: DataProto):
    work = RowWork.of(batch, COST, balance=True)
    # 8 tokens of which 4 are scored: 4 * 8 + 4 + 2 * 36; 1 token: 4 + 2; 2 tokens: 8 + 2 * 3; 6
    # tokens: 24 + 2 + 2 * 21
    assert work.flops_B.tolist() == [108, 108, 6, 6, 68, 14, 68, 14]


def test_balanced_ranks_get_equal_work_and_others_their_rows_as_they_come(
    batch: DataProto, group: LocalWorkerGroup
):
    assert (
        tokens_of_ranks(group, RowWork.of(batch, COST, balance=False), batch) == [18] * 4 + [16] * 4
    )
    assert tokens_of_ranks(group, RowWork.of(batch, COST, balance=True), batch) == [17] * 8


def test_an_update_has_the_same_mini_batches_balanced_or_not(
    batch: DataProto, group: LocalWorkerGroup
):
    for balance in (False, True):
        work = RowWork.of(batch, COST, balance=balance)
        # Rank, mini-batch, row
        ranks = np.stack(work.shares(num_ranks=2, num_of_step=4)).reshape(2, 2, 2)
        assert [sorted(ranks[:, i].flatten().tolist()) for i in range(2)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
        ]
        submitted = work.submit(group.work, batch, num_of_step=4).get().batch["sum"]
        assert (
            submitted[ranks[0].flatten()].tolist()
            == [sum(LENGTHS[row] for row in ranks[0].flatten())] * 4
        )
    assert np.array(LENGTHS)[ranks].sum(-1).tolist() == [[9, 8], [9, 8]]


def test_rows_that_do_not_divide_are_balanced_too(batch: DataProto, group: LocalWorkerGroup):
    # Of 8, 8, 1, 1, 6, 2, 6 tokens, with work 108, 108, 6, 6, 68, 14 and 68, each rank has a long
    # row and a row of 6.
    short = batch.rows(0, 7)
    tokens = tokens_of_ranks(group, RowWork.of(short, COST, balance=True), short)
    assert sorted(tokens) == [16] * 4 + [16] * 3 and len(tokens) == 7


def test_a_method_that_takes_the_whole_batch_gets_it_as_it_is(
    batch: DataProto, group: LocalWorkerGroup
):
    assert RowWork.of(batch, COST, balance=True).submit(group.everything, batch).get() == [8, 8]


def test_the_imbalance_before_and_after_is_reported(batch: DataProto, group: LocalWorkerGroup):
    metrics = RowWork.of(batch, COST, balance=True).metrics(group.work, num_of_step=4)
    values = {name: metric.value for name, metric in metrics.items()}
    # Unbalanced: rank 0 has rows 0, 1, 4, 5 (24 tokens), rank 1 the others (10); the slower one
    # sets the pace.
    assert values == {
        "global_seqlen/min": 10,
        "global_seqlen/max": 24,
        "global_seqlen/minmax_diff": 14,
        "global_seqlen/mean": 17,
        "global_seqlen/balanced_min": 17,
        "global_seqlen/balanced_max": 17,
        "perf/imbalance/unbalanced": pytest.approx((216 + 82) / (114 + 82)),
        "perf/imbalance/balanced": 1.0,
    }


def test_the_imbalance_is_that_of_each_mini_batch():
    # Three mini-batches of two rows, a row each for two ranks, without attention or head: 4 FLOPs a
    # token. The slower rank has 8, 6 and 5 tokens; even ranks would have (8 + 1) / 2, (6 + 2) / 2
    # and (3 + 5) / 2.
    batch = rows_of([8, 1, 2, 6, 3, 5])
    cost = ModelCost(per_token=4.0, per_scored_token=0.0, per_pair=())
    metrics = RowWork.of(batch, cost, balance=False).metrics(
        LocalWorkerGroup(ClassWithInitArgs(Summing), world_size=2).work, num_of_step=2
    )
    for name in ("unbalanced", "balanced"):
        assert metrics[f"perf/imbalance/{name}"].value == pytest.approx((8 + 6 + 5) / (4.5 + 4 + 4))


# Samples of 8, 4 + 3, 2 and 1 + 4 tokens.
SAMPLES = {"lengths": [8, 4, 3, 2, 1, 4], "sample_id": torch.tensor([5, 2, 2, 9, 0, 0])}


def test_ranks_get_whole_samples_of_even_work(group: LocalWorkerGroup):
    batch = rows_of(**SAMPLES)
    work = RowWork.of(
        batch, ModelCost(per_token=4.0, per_scored_token=0.0, per_pair=()), balance=True
    )
    assert (work.num_samples, work.sample_of_row.tolist()) == (4, [0, 1, 1, 2, 3, 3])
    # 8 + 2 tokens and 7 + 5; single rows could be 11 and 11.
    on_rank = work.submit(group.ranks, batch).get().batch["rank"].tolist()
    assert [on_rank[0] == rank for rank in on_rank] == [True, False, False, True, False, False]
    assert work.submit(group.work, batch).get().batch["sum"].tolist() == [10, 12, 12, 10, 12, 12]
    metrics = {
        name: metric.value for name, metric in work.metrics(group.work, num_of_step=4).items()
    }
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (
        10,
        12,
    )
    assert metrics["perf/imbalance/balanced"] == pytest.approx(12 / 11)


def test_a_mini_batch_is_as_many_samples_of_which_each_rank_has_a_share(group: LocalWorkerGroup):
    batch = rows_of(**SAMPLES)
    for balance in (False, True):
        work = RowWork.of(batch, COST, balance=balance)
        seen = work.submit(group.ranks, batch, num_of_step=2).get().batch
        assert seen["mini_batch"].tolist() == [0, 0, 0, 1, 1, 1]
        rank_S = seen["rank"][torch.tensor([0, 1, 3, 4])]
        assert seen["rank"].tolist() == rank_S[work.sample_of_row].tolist()
        assert rank_S.view(2, 2).sort().values.tolist() == [[0, 1], [0, 1]]


def test_samples_stay_whole_where_nothing_is_balanced(group: LocalWorkerGroup):
    # Three pairs for two ranks: of six rows the first rank would have three.
    batch = rows_of([1, 2, 3, 4, 5, 6], sample_id=torch.tensor([0, 0, 1, 1, 2, 2]))
    work = RowWork.of(batch, COST, balance=False)
    on_rank = work.submit(group.ranks, batch).get().batch["rank"].tolist()
    assert on_rank[0::2] == on_rank[1::2] and sorted(set(on_rank)) == [0, 1]


# Eight samples of four prompts, of 4 tokens each; the third sample has a second row.
PROMPTS = [1, 1, 2, 9, 2, 3, 3, 4, 4]
SAMPLES_OF_PROMPTS = torch.tensor([0, 1, 2, 2, 3, 4, 5, 6, 7])


def rows_of_prompts() -> DataProto:
    batch = rows_of([8] * 9, sample_id=SAMPLES_OF_PROMPTS)
    rows = [[prompt] * 4 for prompt in PROMPTS]
    batch.batch["prompts"] = jagged_from_lists(rows, torch.int64)
    return batch


def test_samples_of_a_prompt_come_to_the_same_rank_if_prompts_are_shared():
    batch = rows_of_prompts()
    work = RowWork.of(batch, COST, balance=True, shares_prompts=True)
    assert work.prompts_S.tolist() == [0, 0, 2, 2, 5, 5, 7, 7]
    # 8 tokens of which 4 are scored: 108, see above. A shared prompt of 4 tokens: 4 * 4 + 2 * 10
    once = 108 - 36
    assert work.flops_B.tolist() == [108, once, 108, 108, once, 108, once, 108, once]
    plain = RowWork.of(batch, COST, balance=True)
    assert plain.prompts_S is None and plain.flops_B.tolist() == [108] * 9

    # Sixteen samples are enough for four pairs on each rank. Without prompts the longest rows are
    # divided first.
    pairs = rows_of([8, 5] * 8)
    prompts = [[1 + row // 2] * 4 for row in range(16)]
    pairs.batch["prompts"] = jagged_from_lists(prompts, torch.int64)
    for shares_prompts in (True, False):
        work = RowWork.of(pairs, COST, balance=True, shares_prompts=shares_prompts)
        rows_of_ranks = [rows.tolist() for rows in work.shares(num_ranks=2, num_of_step=16)]
        assert [len(rows) for rows in rows_of_ranks] == [8, 8]
        are_pairs = [rows[1::2] == [row + 1 for row in rows[::2]] for rows in rows_of_ranks]
        assert all(are_pairs) == shares_prompts


def test_a_method_that_knows_no_mini_batches_is_refused_where_ranks_get_unequal_steps():
    batch = rows_of([8] * 8)
    group = LocalWorkerGroup(ClassWithInitArgs(Reading), world_size=2)
    for balance, shares in ((True, False), (False, True)):
        work = RowWork.of(batch, COST, balance=balance, shares_prompts=shares)
        work.require_mini_batch_column(group.lengths, num_ranks=2, num_of_step=4)
    work = RowWork.of(batch, COST, balance=True, shares_prompts=True)
    with pytest.raises(ValueError, match="does not read the column mini_batch"):
        work.require_mini_batch_column(group.lengths, num_ranks=2, num_of_step=4)


@pytest.mark.parametrize("shares", [True, False])
def test_the_configuration_says_whether_prompts_are_shared(shares: bool):
    config = load_ppo_config(
        [
            "data.train_files=none",
            "data.val_files=none",
            "actor_rollout_ref.model.path=none",
            f"actor_rollout_ref.actor.use_prefix_grouper={shares}",
        ]
    )
    work = work_of_rows(rows_of_prompts(), COST, config)
    assert (work.prompts_S is not None) == shares and work.balance


def test_samples_of_one_number_stay_apart_where_balance_puts_them_side_by_side():
    # Of 10, 1, 10 and 1 tokens a row: each rank gets a long and a short sample, whose numbers may
    # be the same.
    batch = rows_of([10, 10, 1, 1, 10, 10, 1, 1], sample_id=torch.tensor([0, 0, 1, 1, 0, 0, 1, 1]))
    work = RowWork.of(
        batch, ModelCost(per_token=4.0, per_scored_token=0.0, per_pair=()), balance=True
    )
    for given in (work.divided(batch, 2, None).batch, work.divided(batch, 2, 4).batch):
        assert given.batch["sample_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.batch["sample_id"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
