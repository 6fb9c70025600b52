"""Rows with the same prompt compute it once: the same results as those of whole rows."""

from functools import partial

import pytest
import torch
from test_workers_models import FAMILIES, by_row, reference_and_packed
from tiny_experts import CONFIGS, drawn_routing, with_routing, write_experts
from tiny_worker_models import (
    gradients_of,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    relative_error,
    write_model,
)

from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.row_ops import jagged_from_lists, jagged_from_offsets, jagged_parts
from verl_like.trainer.run.router_load import split_load
from verl_like.workers.actor import ActorWorker
from verl_like.workers.models import attention
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.packing import PackedBatch, Rows, pack
from verl_like.workers.models.pretrained import compile_layers
from verl_like.workers.models.routed_experts import OWN
from verl_like.workers.models.shared_prompts import (
    first_rows_of_prompts,
    num_shared_tokens,
    share_prompts,
)
from verl_like.workers.planning.partition import rank_shares, runs_of_prompts
from verl_like.workers.reference import ReferenceWorker

LONG, SHORT, OTHER = [7, 8, 9, 10], [7, 8], [11]
PROMPTS = [LONG, LONG, SHORT, OTHER, LONG, SHORT, LONG]
FIRST_ROWS = [0, 0, 2, 3, 0, 2, 0]
SEED = 1
SHARED = [0, 4, 0, 0, 4, 2, 4]


def batch_of(prompts: list[list[int]] = PROMPTS) -> DataProto:
    """Rows of `make_batch` with other prompts, some of whose response tokens are not scored."""
    data = make_batch(rows=len(prompts), seed=SEED)
    data.batch["prompts"] = jagged_from_lists(prompts, torch.int64)
    mask, offsets = jagged_parts(data.batch["response_mask"])
    mask = mask.clone()
    mask[offsets[1]] = 0  # the first token of a row that takes its prompt from another
    mask[offsets[5] - 1] = 0
    data.batch["response_mask"] = jagged_from_offsets(mask, offsets)
    return data


def packed_both_ways(data: DataProto) -> tuple[Rows, PackedBatch, PackedBatch]:
    rows = Rows.of(data)
    return rows, pack(rows), share_prompts(pack(rows), rows)


def test_a_row_takes_the_prompt_of_the_first_row_that_has_it_and_packs_the_rest():
    columns = {
        "prompts": [[5, 6], [5, 6], [5, 6, 7], [5, 6]],
        "responses": [[1, 2], [3], [4], []],
        "response_mask": [[1, 1], [1], [1], []],
    }
    tensors = {name: jagged_from_lists(rows, torch.int64) for name, rows in columns.items()}
    rows = Rows.of(DataProto.from_dict(tensors))
    packed = share_prompts(pack(rows), rows)
    assert packed.input_ids.tolist() == [[5, 6, 1, 2, 3, 5, 6, 7, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3]]
    assert packed.query_lengths == [4, 1, 4, 0]
    assert packed.sequence_lengths == [4, 3, 4, 2]
    assert packed.token_places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 0, 1]
    assert packed.cu_queries.tolist() == [0, 4, 5, 9, 9]
    # The token before the only response token of row 1 is the last one of row 0's prompt.
    assert packed.scored.tolist() == [1, 1, 2, 7]
    assert packed.labels.tolist() == [1, 3, 2, 4]
    values = torch.tensor([10.0, 30.0, 20.0, 40.0])
    assert packed.of_tokens(values).tolist() == [10, 20, 30, 40]
    assert packed.of_sequences(torch.arange(9)).tolist() == packed.token_places.tolist()


def test_rows_of_different_prompts_are_packed_as_ever():
    data = batch_of([LONG, SHORT, OTHER, [1], [2], [3], [4]])
    rows = Rows.of(data)
    packed = pack(rows)
    assert share_prompts(packed, rows) is packed


def test_equal_prompts_are_found_anywhere_and_a_beginning_is_not_equal():
    rows = Rows.of(batch_of())
    first_rows = first_rows_of_prompts(rows["prompts"])
    assert first_rows.tolist() == FIRST_ROWS
    assert num_shared_tokens(rows, first_rows).tolist() == SHARED


def test_tokens_are_shared_up_to_the_first_one_whose_routing_differs():
    data = batch_of()
    column = alike_in_prompts(data, drawn_routing(data, "mixtral"))
    ids, offsets = jagged_parts(column)
    ids[offsets[1] + 2, 1, 0] = OWN
    ids[offsets[4] + 4, 0, 0] = OWN  # a token of the response
    ids[offsets[5], 0, 2] = OWN
    rows = Rows.of(with_routing(data, jagged_from_offsets(ids, offsets)))
    shared = num_shared_tokens(rows, first_rows_of_prompts(rows["prompts"]))
    assert shared.tolist() == [0, 2, 0, 0, 4, 0, 4]


def alike_in_prompts(data: DataProto, column: torch.Tensor) -> torch.Tensor:
    """A column of routing which is that of the first row of a prompt in all its rows."""
    ids, offsets = jagged_parts(column)
    ids = ids.clone()
    for row, first in enumerate(FIRST_ROWS):
        of_first = ids[offsets[first] : offsets[first] + len(PROMPTS[row])]
        ids[offsets[row] : offsets[row] + len(PROMPTS[row])] = of_first
    return jagged_from_offsets(ids, offsets)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_of_a_family_are_those_of_whole_rows(family):
    """With windows, bounded logits and sinks, in groups of heads."""
    _reference, hf = reference_and_packed(FAMILIES[family])
    policy = PolicyModel(hf)
    rows, whole, shared = packed_both_ways(batch_of())
    assert shared.input_ids.size(1) == whole.input_ids.size(1) - sum(SHARED)
    weights = torch.linspace(-1, 1, len(whole.places))
    results = []
    for packed in (whole, shared):
        policy.zero_grad()
        log_probs, entropies = policy(packed, 0.7, with_entropy=True)
        values = packed.of_tokens(log_probs) + packed.of_tokens(entropies)
        loss = values[whole.places] @ weights
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in hf.named_parameters()}
        results.append((by_row(rows, packed, log_probs), gradients))
    (expected, expected_gradients), (got, gradients) = results
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert relative_error(gradients, expected_gradients) < 1e-5


def test_gradients_in_bfloat16_of_a_token_that_many_rows_share_are_summed_in_float32():
    """One by one in bfloat16, a sum of ones stays at 256."""
    key = torch.ones(1, 2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    places = torch.tensor([0] + [2] * 300)
    taken = attention._at_places(key, places)
    assert taken.shape == (1, 2, 301, 4)
    taken.sum().backward()
    assert [key.grad[:, :, token].unique().tolist() for token in range(3)] == [[1], [0], [300]]


def test_a_model_that_does_not_hand_on_what_sequences_share_is_refused():
    attend = attention.packed_attention(attention.packed_sdpa)
    query = torch.ones(1, 1, 6, 8)
    lengths = torch.tensor([4, 4])
    starts = torch.tensor([0, 4, 8])
    with pytest.raises(ValueError, match="Linear is not told which tokens sequences share"):
        attend(
            torch.nn.Linear(1, 1),
            query,
            query,
            query,
            None,
            cu_seqlens=starts,
            sequence_lengths=lengths,
        )


def updated(path: str, data: DataProto, shares: bool, **settings):
    """Gradients, parameters, metrics and load of an update, with prompts shared or not."""
    config = policy_config(path, use_prefix_grouper=shares, **settings)
    group = local_group(ActorWorker, config)
    gradients, output = gradients_of(group.workers[0], lambda: group.update_actor(data).get())
    metrics, load = split_load(metric_values(output.meta_info["metrics"]))
    return gradients, parameters_of(group.workers[0]), metrics, load


@pytest.mark.parametrize("sizes", [{"micro": 3}, {"budget": 25}], ids=["by rows", "by tokens"])
def test_an_update_is_that_of_whole_rows_and_computes_fewer_tokens(tmp_path, sizes, monkeypatch):
    path = write_model(tmp_path)
    data = batch_of()
    plain, after, metrics, _load = updated(path, data, shares=False, **sizes)
    num_computed = []
    run = PolicyModel.hidden_states

    def counting(self, packed):
        num_computed.append(packed.input_ids.size(1))
        return run(self, packed)

    monkeypatch.setattr(PolicyModel, "hidden_states", counting)
    gradients, got_after, got_metrics, _load = updated(path, data, shares=True, **sizes)
    num_tokens = int(Rows.of(data).lengths_B.sum())
    assert num_tokens - sum(SHARED) <= sum(num_computed) < num_tokens
    assert relative_error(gradients, plain) < 1e-5
    assert relative_error(got_after, after) < 1e-5
    for name in ("actor/loss", "actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        if name in metrics:
            assert got_metrics[name] == pytest.approx(metrics[name], rel=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("replayed", [True, False])
def test_experts_are_replayed_counted_and_balanced_as_in_whole_rows(tmp_path, family, replayed):
    path = write_experts(tmp_path, family)
    data = batch_of()
    settings = {"micro": 7}
    has_balance = family in ("mixtral", "qwen3_moe", "gpt_oss")
    if has_balance:
        settings["router_aux_loss_coef"] = 0.5
    if replayed:
        settings["router_replay"] = {"mode": "R2"}
        column = alike_in_prompts(data, drawn_routing(data, family))
        ids, offsets = jagged_parts(column)
        ids[offsets[6] + 3] = OWN  # one row has no record of the last token of its prompt
        data = with_routing(data, jagged_from_offsets(ids, offsets))
    plain, _after, metrics, load = updated(path, data, shares=False, **settings)
    gradients, _after, got_metrics, got_load = updated(path, data, shares=True, **settings)
    assert relative_error(gradients, plain) < 1e-5
    assert got_load == load
    if has_balance:
        aux_loss = metrics["actor/router_aux_loss"]
        assert got_metrics["actor/router_aux_loss"] == pytest.approx(aux_loss, rel=1e-5)


def test_log_probs_and_recorded_routing_of_all_tokens_are_those_of_whole_rows(tmp_path):
    path = write_experts(tmp_path, "mixtral")
    data = batch_of()
    scored = []
    for shares in (False, True):
        config = policy_config(path, router_replay={"mode": "R2"}, use_prefix_grouper=shares)
        scored.append(local_group(ActorWorker, config).compute_log_prob(data).get().batch)
    whole, shared = scored
    for name in ("old_log_probs", "entropys"):
        values, offsets = jagged_parts(shared[name])
        expected, expected_offsets = jagged_parts(whole[name])
        assert torch.equal(offsets, expected_offsets)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    ids, offsets = jagged_parts(shared["routed_experts"])
    expected, expected_offsets = jagged_parts(whole["routed_experts"])
    assert torch.equal(ids, expected) and torch.equal(offsets, expected_offsets)


def test_the_reference_policy_shares_prompts_as_the_actor_does(tmp_path, monkeypatch):
    path = write_model(tmp_path)
    data = batch_of()
    num_computed = []
    run = PolicyModel.hidden_states

    def counting(self, packed):
        num_computed.append(packed.input_ids.size(1))
        return run(self, packed)

    monkeypatch.setattr(PolicyModel, "hidden_states", counting)
    columns = []
    for shares in (False, True):
        group = local_group(ReferenceWorker, policy_config(path, use_prefix_grouper=shares))
        columns.append(group.compute_ref_log_prob(data).get().batch["ref_log_prob"].values())
    whole, shared = num_computed
    assert whole - shared == sum(SHARED)
    torch.testing.assert_close(columns[1], columns[0], rtol=0, atol=1e-5)


def test_a_pass_without_rows_runs(tmp_path):
    config = policy_config(write_model(tmp_path), use_prefix_grouper=True)
    group = local_group(ActorWorker, config)
    empty = batch_of().select_idxs(torch.arange(0))
    assert len(group.compute_log_prob(empty).get()) == 0


def test_runs_have_consecutive_samples_of_one_prompt_up_to_a_size():
    prompts = [4, 4, 4, 4, 7, 4, 4]
    sizes = [2, 3, 2, 9, 1, 1, 1]
    runs = runs_of_prompts(prompts, sizes, largest=5)
    # 2 + 3 fill a run, 2 + 9 do not fit into one, and 9 alone is too large and still a run.
    assert [run.tolist() for run in runs] == [[0, 1], [2], [3], [4], [5, 6]]
    assert runs_of_prompts([], [], largest=5) == []


def test_ranks_get_the_samples_of_a_prompt_together_as_long_as_there_are_enough_of_them():
    prompts = [0] * 4 + [4] * 4 + [8] * 4 + [12] * 4 + [16] * 8 + [24] * 8
    work = [1.0] * 16 + [2.0] * 16
    shares = rank_shares(32, 16, num_ranks=1, work_S=work, prompts_S=prompts)
    assert shares[0].tolist() == list(range(32))
    # Four runs of a rank, of two samples each: in the first step 16 / (4 * 2) = 2.
    of_ranks = rank_shares(32, 16, num_ranks=2, work_S=work, prompts_S=prompts)
    for share in of_ranks:
        assert len(share) == 16 and sum(work[sample] for sample in share) == 24
        pairs = share.reshape(-1, 2)
        assert (pairs[:, 0] % 2 == 0).all() and (pairs[:, 1] == pairs[:, 0] + 1).all()
    assert sorted(int(sample) for share in of_ranks for sample in share) == list(range(32))


def test_compiled_layers_share_prompts_and_are_not_compiled_again_for_each_pass(monkeypatch):
    # Graphs without a C++ compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    _reference, hf = reference_and_packed(FAMILIES["qwen3"])
    policy = PolicyModel(hf)
    sizes = range(3, 13)
    batches = [Rows.of(batch_of([LONG, SHORT] + [LONG] * size)) for size in sizes]
    with torch.no_grad():
        expected = [policy(pack(rows), 1.0)[0] for rows in batches]
    compile_layers(hf)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for rows, whole in zip(batches, expected, strict=True):
        packed = share_prompts(pack(rows), rows)
        values = packed.of_tokens(policy(packed, 1.0)[0])
        torch.testing.assert_close(values[pack(rows).places], whole, rtol=0, atol=1e-5)
    assert 0 < graphs["unique_graphs"] - before < len(sizes)
