"""What a method that was written for verl gets of a batch without padding, and what becomes of its
results."""

from typing import Any

import numpy as np
import pytest
import torch

from verl_like.protocol import DataProto, pad_dataproto_to_divisor
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.single_controller import Dispatch, Ordered, Worker, register
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs

PROTO = Dispatch.DP_COMPUTE_PROTO
PADDING = (4, 3, 9)  # prompts of at most 4 tokens, responses of at most 3, padding token 9


def ints(*rows: list[int]) -> torch.Tensor:
    return jagged_from_lists(rows, torch.int64)


def floats(*rows: list[float]) -> torch.Tensor:
    return jagged_from_lists(rows, torch.float32)


def batch() -> DataProto:
    """Three rows, the second with an empty response."""
    return DataProto.from_dict(
        {
            "prompts": ints([1, 2], [3, 4, 5, 6], [7]),
            "responses": ints([10, 11, 12], [], [13]),
            "response_mask": ints([1, 0, 1], [], [1]),
            "old_log_probs": floats([-0.5, -1.0, -1.5], [], [-2.0]),
            "weight": torch.tensor([0.5, 1.0, 2.0]),
        },
        {"uid": ["a", "b", "c"]},
        {"padding": PADDING, "global_steps": 7},
    )


def verls_layout() -> dict[str, list]:
    """The same rows, padded."""
    return {
        "prompts": [[9, 9, 1, 2], [3, 4, 5, 6], [9, 9, 9, 7]],
        "responses": [[10, 11, 12], [9, 9, 9], [13, 9, 9]],
        "response_mask": [[1, 0, 1], [0, 0, 0], [1, 0, 0]],
        "old_log_probs": [[-0.5, -1.0, -1.5], [0.0, 0.0, 0.0], [-2.0, 0.0, 0.0]],
        "weight": [0.5, 1.0, 2.0],
        "input_ids": [[9, 9, 1, 2, 10, 11, 12], [3, 4, 5, 6, 9, 9, 9], [9, 9, 9, 7, 13, 9, 9]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]],
        "position_ids": [[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3]],
    }


def lists(data: DataProto) -> dict[str, list]:
    """Each tensor as rows of numbers."""
    return {
        name: [row.tolist() for row in column.unbind()] for name, column in data.tensors().items()
    }


def jagged_names(data: DataProto) -> set[str]:
    return {name for name, column in data.tensors().items() if column.is_nested}


class VerlWorker(Worker):
    """Remembers the batch that it got, and returns what a test says, or columns made of the
    batch."""

    def __init__(self) -> None:
        self.seen: DataProto | None = None

    @register(dispatch_mode=PROTO)
    def read_all(self, data: DataProto) -> DataProto:
        self.seen = data
        return DataProto(meta_info={"ok": True})

    @register(
        dispatch_mode=PROTO, reads=["input_ids", "old_log_probs", "weight?", "uid", "absent?"]
    )
    def read_some(self, data: DataProto) -> DataProto:
        self.seen = data
        return DataProto(meta_info={"ok": True})

    @register(dispatch_mode=PROTO, reads=["input_ids"])
    def read_tokens(self, data: DataProto) -> DataProto:
        self.seen = data
        return DataProto.from_dict({"longest": data.batch["input_ids"].max(-1).values})

    @register(
        dispatch_mode=PROTO,
        reads=["old_log_probs"],
        writes=["doubled", "mean", "rank", "embedding", "name"],
    )
    def score(self, data: DataProto) -> DataProto:
        log_probs = data.batch["old_log_probs"]
        return DataProto.from_dict(
            {
                "doubled": 2 * log_probs + 100,  # also on padding
                "experts": torch.stack([log_probs, -log_probs], dim=2),
                "mean": log_probs.mean(-1),
                "rank": torch.full((len(data),), self.rank),
                "embedding": torch.zeros(len(data), 5),
            },
            {"name": [f"row {i}" for i in range(len(data))]},
            {"metrics": {}},
        )

    @register(dispatch_mode=PROTO, reads=["input_ids", "attention_mask", "position_ids"])
    def generate(self, prompts: DataProto, n: int = 2) -> DataProto:
        """n responses to each prompt as a rollout worker of verl returns them: j times the last
        token of the prompt, where j is the number of the response from 0; the first one is
        empty."""
        self.seen = prompts
        num_rows, width = len(prompts) * n, 2  # narrower than the batch allows
        columns = {name: column.repeat_interleave(n, 0) for name, column in prompts.batch.items()}
        lengths = torch.arange(num_rows) % n
        attended = (torch.arange(width) < lengths[:, None]).long()
        responses = torch.where(attended.bool(), columns["input_ids"][:, -1:], 9)
        return DataProto.from_dict(
            {
                "prompts": columns["input_ids"],
                "responses": responses,
                "input_ids": torch.cat([columns["input_ids"], responses], dim=1),
                "attention_mask": torch.cat([columns["attention_mask"], attended], dim=1),
                "position_ids": torch.zeros(
                    num_rows, columns["input_ids"].size(1) + width, dtype=torch.int64
                ),
                "rollout_log_probs": -1.0 * attended - 5.0 * (1 - attended),
                "length": lengths,
            },
            {"policy_version": [((3, 0, int(length)),) for length in lengths]},
        )

    @register(dispatch_mode=PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(
        dispatch_mode=PROTO, reads=["input_ids", "prompts", "responses", "old_log_probs", "weight"]
    )
    def echo_some(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=PROTO, reads=["prompt_scores"])
    def echo_prompt_scores(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=PROTO, jagged=True)
    def echo_jagged(self, data: DataProto) -> DataProto:
        self.seen = data
        return data

    @register(dispatch_mode=PROTO, reads=["responses", "old_log_probs"], jagged=True)
    def return_wide_columns(self, data: DataProto) -> DataProto:
        self.seen = data
        return DataProto.from_dict({"wide": torch.zeros(len(data), 3)})

    @register(dispatch_mode=PROTO, reads=["old_log_probs"])
    def write_in_place(self, data: DataProto) -> DataProto:
        data.batch["old_log_probs"] += 1
        return DataProto.from_dict({"moved": data.batch["old_log_probs"]})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, reads=["values"])
    def read_values(self, data: DataProto) -> None: ...

    @register(dispatch_mode=PROTO)
    def stream(self, data: DataProto):
        yield data.batch["responses"].tolist()
        return DataProto.from_dict({"doubled": 2 * data.batch["old_log_probs"]})


def group_of(num_ranks: int = 1) -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(VerlWorker), num_ranks)


def seen(group: LocalWorkerGroup, rank: int = 0) -> DataProto:
    return group.workers[rank].seen


def test_a_method_sees_padded_columns_in_verls_layout():
    group, data = group_of(), batch()
    assert group.read_all(data).meta_info == {"ok": True}
    assert lists(seen(group)) == verls_layout() and not jagged_names(seen(group))
    assert seen(group).non_tensor_batch["uid"].tolist() == ["a", "b", "c"]
    assert seen(group).meta_info == {"padding": PADDING, "global_steps": 7}
    assert data.equal(batch()), "the driver's batch stays as it is"


def test_the_batch_says_how_wide_padded_columns_are():
    group, data = group_of(), batch()
    data.meta_info["padding"] = (5, 4, 0)
    group.read_all(data)
    assert lists(seen(group))["prompts"] == [[0, 0, 0, 1, 2], [0, 3, 4, 5, 6], [0, 0, 0, 0, 7]]
    assert lists(seen(group))["responses"] == [[10, 11, 12, 0], [0, 0, 0, 0], [13, 0, 0, 0]]
    assert seen(group).batch["input_ids"].shape == (3, 9)


def test_a_method_sees_only_the_columns_that_it_reads():
    group = group_of()
    group.read_some(batch())
    assert lists(seen(group)) == {
        name: verls_layout()[name] for name in ("input_ids", "old_log_probs", "weight")
    }
    assert list(seen(group).non_tensor_batch) == ["uid"]
    assert group.read_tokens(batch()).batch["longest"].tolist() == [12, 9, 13]
    assert list(seen(group).batch.keys()) == ["input_ids"] and not seen(group).non_tensor_batch


def test_columns_of_verls_layout_can_be_read_where_a_batch_has_prompts():
    with pytest.raises(
        ValueError, match=r"read_tokens reads 'input_ids', not in its batch .*Present: \['weight'\]"
    ):
        group_of().read_tokens(DataProto.from_dict({"weight": torch.ones(3)}))
    with pytest.raises(ValueError, match=r"read_some reads 'old_log_probs', not in its batch"):
        group_of().read_some(batch().select(["prompts", "responses"]))


def test_a_method_that_takes_jagged_columns_cannot_read_those_of_verls_layout():
    class Reader(Worker):
        @register(dispatch_mode=PROTO, reads=["input_ids"], jagged=True)
        def read(self, data: DataProto) -> DataProto:
            return data

    with pytest.raises(ValueError, match=r"reads 'input_ids', not in its batch"):
        LocalWorkerGroup(ClassWithInitArgs(Reader)).read(batch())


def test_prompts_without_responses_are_the_whole_sequence():
    group = group_of()
    group.read_all(batch().select(["prompts", "weight"]))
    expected = {"prompts": verls_layout()["prompts"], "weight": [0.5, 1.0, 2.0]}
    assert lists(seen(group)) == expected | {
        "input_ids": [[9, 9, 1, 2], [3, 4, 5, 6], [9, 9, 9, 7]],
        "attention_mask": [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]],
        "position_ids": [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]],
    }


def test_results_by_response_token_lose_their_padding_and_others_stay():
    result = group_of().score(batch())
    assert lists(result) == {
        "doubled": [[99.0, 98.0, 97.0], [], [96.0]],
        "experts": [[[-0.5, 0.5], [-1.0, 1.0], [-1.5, 1.5]], [], [[-2.0, 2.0]]],
        "mean": [-1.0, 0.0, pytest.approx(-2 / 3)],
        "rank": [0, 0, 0],
        "embedding": [[0.0] * 5] * 3,
    }
    assert jagged_names(result) == {"doubled", "experts"}
    assert (
        result.non_tensor_batch["name"].tolist() == ["row 0", "row 1", "row 2"]
        and "metrics" in result.meta_info
    )
    assert batch().union(result).batch["doubled"].is_nested, "as long as the responses of the batch"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_a_rollout_worker_of_verl_gives_jagged_rows(num_ranks):
    group = group_of(num_ranks)
    prompts = batch().select(["prompts"])
    result = group.generate(prompts)
    assert lists(result) == {
        "prompts": [[1, 2], [1, 2], [3, 4, 5, 6], [3, 4, 5, 6], [7], [7]],
        "responses": [[], [2], [], [6], [], [7]],
        "response_mask": [[], [1], [], [1], [], [1]],
        "rollout_log_probs": [[], [-1.0], [], [-1.0], [], [-1.0]],
        "length": [0, 1, 0, 1, 0, 1],
    }
    assert jagged_names(result) == {"prompts", "responses", "response_mask", "rollout_log_probs"}
    assert result.non_tensor_batch["policy_version"][1] == ((3, 0, 1),)
    repeated = prompts.select([]).repeat(2, interleave=True)
    assert repeated.union(result).meta_info["padding"] == PADDING, (
        "the width of responses is that of the batch"
    )
    assert sorted(seen(group).batch.keys()) == ["attention_mask", "input_ids", "position_ids"]


def test_a_batch_that_is_returned_as_it_came_is_the_batch_again():
    for data in (batch(), batch()[[1]], batch()[[]]):
        assert lists(group_of().echo(data)) == lists(data) and jagged_names(
            group_of().echo(data)
        ) == jagged_names(data)


def test_columns_that_were_made_for_a_method_are_not_returned_alone():
    result = group_of().echo_some(batch())
    expected = batch().select(["prompts", "responses", "old_log_probs", "weight"])
    assert lists(result) == lists(expected) and jagged_names(result) == jagged_names(expected)


def test_columns_by_prompt_token_are_not_padded():
    group, data = group_of(), batch()
    data.batch["prompt_scores"] = floats([0.5, 0.25], [1, 2, 3, 4], [5])
    group.read_all(data)
    assert lists(seen(group)) == verls_layout() | {
        "prompt_scores": [[0.5, 0.25], [1, 2, 3, 4], [5]]
    }
    assert jagged_names(seen(group)) == {"prompt_scores"}
    assert lists(group.echo(data)) == lists(data)
    assert lists(group.echo_prompt_scores(data)) == lists(data.select(["prompt_scores"]))


def test_a_jagged_method_gets_and_returns_jagged_columns():
    group = group_of()
    result = group.echo_jagged(batch())
    assert seen(group).equal(batch()) and result.equal(batch())
    assert group.return_wide_columns(batch()).batch["wide"].shape == (3, 3), (
        "as wide as padded responses, but stays"
    )
    assert sorted(seen(group).batch.keys()) == ["old_log_probs", "responses"]
    assert jagged_names(seen(group)) == {"old_log_probs", "responses"}
    # Nor does it need to know how wide padded columns would be.
    bare = batch().select(meta_info_keys=[])
    assert group.echo_jagged(bare).equal(bare)


def test_jagged_prompts_without_a_width_are_refused():
    with pytest.raises(WorkerError, match=r"no meta_info\['padding'\]") as caught:
        group_of().read_all(batch().select(meta_info_keys=[]))
    assert "set it to (data.max_prompt_length, data.max_response_length, the padding token)" in str(
        caught.value
    )


def test_rows_that_are_longer_than_the_width_are_refused():
    data = batch()
    data.meta_info["padding"] = (4, 2, 9)
    with pytest.raises(WorkerError, match="a row has 3 tokens, but padded rows have 2, as"):
        group_of().read_all(data)


@pytest.mark.parametrize(
    "data",
    [
        DataProto.from_dict(
            {"responses": ints([1], [2, 3]), "scores": torch.ones(2, 3)}, {"uid": ["a", "b"]}
        ),
        DataProto.from_dict({"prompts": torch.ones(2, 3), "responses": torch.ones(2, 3)}),
        DataProto.from_dict(non_tensors={"uid": ["a", "b"]}),
    ],
    ids=["without prompts", "with dense prompts", "without tensors"],
)
def test_a_batch_without_jagged_prompts_is_left_alone(data: DataProto):
    group = group_of()
    group.read_all(data)
    assert seen(group).equal(data) and group.echo(data).equal(data)


def test_dense_prompts_do_not_stand_for_columns_of_verls_layout():
    with pytest.raises(ValueError, match=r"reads 'input_ids', not in its batch"):
        group_of().read_tokens(DataProto.from_dict({"prompts": torch.ones(2, 3)}))


def test_a_method_that_does_not_read_prompts_does_not_see_dense_ones():
    group = group_of()
    data = {
        "prompts": torch.ones(2, 3),
        "responses": torch.ones(2, 3),
        "old_log_probs": torch.ones(2, 3),
    }
    group.score(DataProto.from_dict(data))
    group.read_some(
        DataProto.from_dict({**data, "input_ids": torch.ones(2, 6)}, {"uid": ["a", "b"]})
    )
    assert sorted(seen(group).batch.keys()) == ["input_ids", "old_log_probs"]


def test_padding_rows_keep_their_mark():
    group = group_of()
    filled, num_added = pad_dataproto_to_divisor(batch(), 2)
    group.read_some(filled)
    assert num_added == 1 and seen(group).batch["is_pad"].tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("num_rows", "shares"), [(0, [[], []]), (1, [["a"], []]), (3, [["a", "b"], ["c"]])]
)
def test_ranks_with_fewer_rows_than_there_are_ranks(num_rows: int, shares: list[list[str]]):
    group, data = group_of(2), batch()[list(range(num_rows))]
    group.read_all(data)
    for rank, names in enumerate(shares):
        rows = [["a", "b", "c"].index(name) for name in names]
        assert lists(seen(group, rank)) == {
            name: [column[i] for i in rows] for name, column in verls_layout().items()
        }
        assert seen(group, rank).batch["input_ids"].shape == (len(rows), 7)
        assert seen(group, rank).batch["old_log_probs"].shape == (len(rows), 3)
        assert seen(group, rank).non_tensor_batch["uid"].tolist() == names
    result = group.score(data)
    assert lists(result)["doubled"] == [[99.0, 98.0, 97.0], [], [96.0]][:num_rows]
    assert lists(result)["rank"] == [rank for rank, names in enumerate(shares) for _ in names]
    assert jagged_names(result) == {"doubled", "experts"} and len(data.union(result)) == num_rows


def test_results_of_ordered_rows_come_back_in_the_order_of_the_batch():
    group = group_of(2)
    result = group.score(Ordered(batch(), [2, 0, 1], sizes=[1, 2]))
    assert seen(group) is None and lists(result)["doubled"] == [[99.0, 98.0, 97.0], [], [96.0]]
    assert result.batch["rank"].tolist() == [1, 1, 0]


def test_a_stream_sees_padded_columns_and_returns_jagged_ones():
    future = group_of().stream.remote(batch())
    assert list(future.stream()) == [verls_layout()["responses"]]
    assert lists(future.get())["doubled"] == [[-1.0, -2.0, -3.0], [], [-4.0]]


def test_a_result_is_given_on_to_another_method_without_the_driver():
    group = group_of(2)
    data = batch()
    future = group.echo_jagged.remote(data)
    assert lists(group.score(future))["doubled"] == [[99.0, 98.0, 97.0], [], [96.0]]


def test_padded_columns_belong_to_the_method_alone():
    data = batch()
    assert lists(group_of().write_in_place(data))["moved"] == [[0.5, 0.0, -0.5], [], [-1.0]]
    assert data.equal(batch())


def test_the_columns_of_which_padded_ones_are_made_travel_with_those_that_are_read():
    specs: Any = registered_methods(VerlWorker)
    assert specs["score"].sent_columns == ("old_log_probs", "prompts", "responses")
    assert specs["return_wide_columns"].sent_columns == ("responses", "old_log_probs")
    assert specs["read_all"].sent_columns is None and specs["echo_jagged"].sent_columns is None


def test_arrays_of_numbers_stay_beside_padded_columns():
    data = batch()
    data.non_tensor_batch["length"] = np.array([3, 0, 1])
    group = group_of()
    group.read_all(data)
    assert seen(group).non_tensor_batch["length"].tolist() == [3, 0, 1]
    assert group.echo(data).non_tensor_batch["length"].dtype == np.int64
