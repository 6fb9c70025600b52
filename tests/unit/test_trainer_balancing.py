"""Which rows the ranks of a call get, on groups of this process."""

import numpy as np
import pytest
import torch

from verl_like.protocol import DataProto
from verl_like.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.trainer.balancing import RowWork
from verl_like.workers.planning.flops import ModelCost

# 4 FLOPs a token, one for a scored token and 2 for a pair of tokens.
COST = ModelCost(per_token=4.0, per_scored_token=1.0, per_pair=((2.0, None),))
LENGTHS = [8, 8, 1, 1, 6, 2, 6, 2]


class Summing(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def work(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"sum": batch.batch["tokens"].sum().expand(len(batch))})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def everything(self, batch: DataProto) -> int:
        return len(batch)


def columns(attended: torch.Tensor, scored: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows that begin at their first column."""
    positions = torch.arange(attended.size(1)).expand(attended.shape)
    return {"attention_mask": attended.long(), "position_ids": positions, "response_mask": scored.long()}


@pytest.fixture
def batch() -> DataProto:
    tokens = torch.tensor(LENGTHS)
    mask = torch.arange(8) < tokens[:, None]
    return DataProto.from_dict(tensors={"tokens": tokens} | columns(mask, mask[:, 4:]))


@pytest.fixture
def group() -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(Summing), world_size=2)


def tokens_of_ranks(group: LocalWorkerGroup, work: RowWork, batch: DataProto) -> list[int]:
    """For each row the tokens that its rank got."""
    return work.submit(group.work, batch).get().batch["sum"].tolist()


def test_work_is_counted_with_attention_and_the_head_of_the_response(batch: DataProto):
    work = RowWork.of(batch, COST, balance=True)
    # 8 tokens of which 4 are scored: 4 * 8 + 4 + 2 * 36; 1 token: 4 + 2; 2 tokens: 8 + 2 * 3; 6 tokens: 24 + 2 + 2 * 21
    assert work.flops_B.tolist() == [108, 108, 6, 6, 68, 14, 68, 14]


def test_balanced_ranks_get_equal_work_and_others_their_rows_as_they_come(batch: DataProto, group: LocalWorkerGroup):
    assert tokens_of_ranks(group, RowWork.of(batch, COST, balance=False), batch) == [18] * 4 + [16] * 4
    assert tokens_of_ranks(group, RowWork.of(batch, COST, balance=True), batch) == [17] * 8


def test_an_update_has_the_same_mini_batches_balanced_or_not(batch: DataProto, group: LocalWorkerGroup):
    for balance in (False, True):
        work = RowWork.of(batch, COST, balance=balance)
        ranks = np.stack(work.shares(num_ranks=2, num_mini_batch_rows=4)).reshape(2, 2, 2)  # rank, mini-batch, row
        assert [sorted(ranks[:, i].flatten().tolist()) for i in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        submitted = work.submit(group.work, batch, num_mini_batch_rows=4).get().batch["sum"]
        assert submitted[ranks[0].flatten()].tolist() == [sum(LENGTHS[row] for row in ranks[0].flatten())] * 4
    assert np.array(LENGTHS)[ranks].sum(-1).tolist() == [[9, 8], [9, 8]]


def test_rows_that_do_not_divide_are_balanced_too(batch: DataProto, group: LocalWorkerGroup):
    # Of 8, 8, 1, 1, 6, 2, 6 tokens, with work 108, 108, 6, 6, 68, 14 and 68, each rank has a long row and a row of 6.
    short = batch.rows(0, 7)
    tokens = tokens_of_ranks(group, RowWork.of(short, COST, balance=True), short)
    assert sorted(tokens) == [16] * 4 + [16] * 3 and len(tokens) == 7


def test_a_method_that_takes_the_whole_batch_gets_it_as_it_is(batch: DataProto, group: LocalWorkerGroup):
    assert RowWork.of(batch, COST, balance=True).submit(group.everything, batch).get() == [8, 8]


def test_the_imbalance_before_and_after_is_reported(batch: DataProto, group: LocalWorkerGroup):
    metrics = RowWork.of(batch, COST, balance=True).metrics(group.work, num_mini_batch_rows=4)
    values = {name: metric.value for name, metric in metrics.items()}
    # Unbalanced: rank 0 has rows 0, 1, 4, 5 (24 tokens), rank 1 the others (10); the slower one sets the pace.
    assert values == {
        "global_seqlen/min": 10, "global_seqlen/max": 24, "global_seqlen/minmax_diff": 14, "global_seqlen/mean": 17,
        "global_seqlen/balanced_min": 17, "global_seqlen/balanced_max": 17,
        "perf/imbalance/unbalanced": pytest.approx((216 + 82) / (114 + 82)), "perf/imbalance/balanced": 1.0,
    }  # fmt: skip


def test_the_imbalance_is_that_of_each_mini_batch():
    # Three mini-batches of two rows, a row each for two ranks, without attention or head: 4 FLOPs a token. The slower
    # rank has 8, 6 and 5 tokens; even ranks would have (8 + 1) / 2, (6 + 2) / 2 and (3 + 5) / 2.
    tokens = torch.tensor([8, 1, 2, 6, 3, 5])
    mask = torch.arange(8) < tokens[:, None]
    batch = DataProto.from_dict(tensors=columns(mask, torch.zeros(6, 4)))
    cost = ModelCost(per_token=4.0, per_scored_token=0.0, per_pair=())
    metrics = RowWork.of(batch, cost, balance=False).metrics(
        LocalWorkerGroup(ClassWithInitArgs(Summing), world_size=2).work, num_mini_batch_rows=2
    )
    for name in ("unbalanced", "balanced"):
        assert metrics[f"perf/imbalance/{name}"].value == pytest.approx((8 + 6 + 5) / (4.5 + 4 + 4))
