"""Rows with the same prompt compute it once: the same results as those of whole rows."""

import sys
import types
from functools import partial

import numpy as np
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
from transformers import AttentionInterface

from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.row_ops import jagged_from_lists, jagged_from_offsets, jagged_parts
from verl_like.trainer.run.router_load import split_load
from verl_like.workers.actor import ActorWorker
from verl_like.workers.engine.throughput import peak_flops
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
from verl_like.workers.planning.partition import pack_prompts, rank_shares, runs_of_prompts
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


@pytest.fixture
def passes(monkeypatch) -> list[PackedBatch]:
    """The packed batches of all passes from now on."""
    packed_batches = []
    run = PolicyModel.hidden_states

    def keeping(self, packed):
        packed_batches.append(packed)
        return run(self, packed)

    monkeypatch.setattr(PolicyModel, "hidden_states", keeping)
    return packed_batches


# A group has 10 + 10 + 8 + 10 and 3 + 7 tokens, so with the smallest budget it is divided.
SIZES = {"by rows": {"micro": 3}, "by tokens": {"budget": 25}, "few tokens": {"budget": 11}}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_an_update_is_that_of_whole_rows_and_computes_fewer_tokens(tmp_path, sizes, passes):
    path = write_model(tmp_path)
    data = batch_of()
    plain, after, metrics, _load = updated(path, data, shares=False, **sizes)
    passes.clear()
    gradients, got_after, got_metrics, _load = updated(path, data, shares=True, **sizes)
    num_tokens = int(Rows.of(data).lengths_B.sum())
    num_computed = sum(packed.input_ids.size(1) for packed in passes)
    assert num_tokens - sum(SHARED) <= num_computed <= num_tokens
    if sizes != SIZES["few tokens"]:
        assert num_computed < num_tokens
    budget = sizes.get("budget", num_tokens)
    assert max(sum(packed.sequence_lengths) for packed in passes) <= budget
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


def test_the_reference_policy_shares_prompts_as_the_actor_does(tmp_path, passes):
    path = write_model(tmp_path)
    data = batch_of()
    columns = []
    for shares in (False, True):
        group = local_group(ReferenceWorker, policy_config(path, use_prefix_grouper=shares))
        columns.append(group.compute_ref_log_prob(data).get().batch["ref_log_prob"].values())
    whole, shared = passes
    assert whole.input_ids.size(1) - shared.input_ids.size(1) == sum(SHARED)
    torch.testing.assert_close(columns[1], columns[0], rtol=0, atol=1e-5)


def test_a_pass_without_rows_runs(tmp_path):
    config = policy_config(write_model(tmp_path), use_prefix_grouper=True)
    group = local_group(ActorWorker, config)
    empty = batch_of().select_idxs(torch.arange(0))
    assert len(group.compute_log_prob(empty).get()) == 0


def test_samples_of_a_prompt_are_in_the_same_micro_batch_of_their_step(tmp_path, passes):
    """Two optimizer steps, the second one first in the batch; a sample of two rows, of which the
    first one has the prompt; prompts of different lengths."""
    prompts = [SHORT, SHORT, LONG, OTHER, LONG, [1, 2, 3], SHORT, SHORT]
    lengths = [3, 3, 2, 1, 2, 4, 5, 5]
    columns = {
        "prompts": prompts,
        "responses": [[5] * length for length in lengths],
        "response_mask": [[1] * length for length in lengths],
    }
    tensors = {name: jagged_from_lists(rows, torch.int64) for name, rows in columns.items()}
    numbers = [[0.5] * length for length in lengths]
    for name in ("advantages", "old_log_probs"):
        tensors[name] = jagged_from_lists(numbers, torch.float32)
    tensors["sample_id"] = torch.tensor([0, 1, 2, 2, 3, 4, 5, 6])
    tensors["mini_batch"] = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])
    config = policy_config(write_model(tmp_path), budget=16, use_prefix_grouper=True)
    local_group(ActorWorker, config).update_actor(DataProto.from_dict(tensors)).get()
    # The first step: 6 + 2 tokens of the sample of two rows with 6 of the next one, the two rows of
    # the last prompt, and the row between them.
    assert sorted(packed.sequence_lengths for packed in passes[:-1]) == [[6, 2, 6], [7], [7, 7]]
    assert passes[-1].sequence_lengths == [5, 5]
    of_group = next(packed for packed in passes if packed.sequence_lengths == [7, 7])
    assert of_group.query_lengths == [7, 5]


def test_prompts_take_the_flops_of_the_rows_that_compute_them(tmp_path):
    """MFU by tokens a second, which is FLOPs by tokens and peak: with all rows in a pass a prompt
    costs once, with one row in a pass as often as it occurs.

    The loss that balances experts counts their load by a first pass over several micro-batches,
    which is no part of the update's FLOPs.
    """
    path = write_experts(tmp_path, "mixtral")
    data = batch_of()
    rows = Rows.of(data)
    padded = torch.tensor([False] * 6 + [True])
    data.batch["is_pad"] = padded
    peak = peak_flops("cpu", "float32")
    for micro, shared in ((7, SHARED), (4, [0, 4, 0, 0, 0, 0, 4]), (1, [0] * 7)):
        settings = {"router_aux_loss_coef": 0.5, "use_prefix_grouper": True, "ppo_epochs": 2}
        config = policy_config(path, micro=micro, **settings)
        group = local_group(ActorWorker, config)
        cost = group.workers[0].engine.cost
        flops_B = cost.forward(rows.lengths_B, rows.num_scored_B)
        flops_B -= cost.forward(torch.tensor(shared), torch.zeros(7))
        flops_by_tokens = float(flops_B[:6].sum() / rows.lengths_B[:6].sum())
        outputs = {
            "actor_infer": group.compute_log_prob(data).get(),
            "actor": group.update_actor(data).get(),
        }
        for phase, forward_passes in (("actor_infer", 1), ("actor", 3 * 2)):
            measured = metric_values(outputs[phase].meta_info["metrics"])
            ratio = measured[f"perf/mfu/{phase}"] / measured[f"perf/tokens_per_s/{phase}"]
            assert ratio == pytest.approx(forward_passes * flops_by_tokens / peak, rel=1e-6)


def test_a_row_that_fits_no_micro_batch_is_named_by_its_own_number():
    with pytest.raises(ValueError, match="row 3 has 9 tokens, more than the 8"):
        pack_prompts([2, 2, 2, 9], [0, 0, 0, 3], max_tokens=8)


class ArgumentsOfKernel:
    """In the place of a kernel: it keeps its arguments."""

    def __call__(self, query, key, value, *arguments, **options):
        self.arguments = arguments
        return torch.zeros_like(query)


@pytest.mark.parametrize("name", ["varlen", "flash"])
def test_kernels_get_the_bounds_of_queries_and_of_keys(monkeypatch, name):
    kernel = ArgumentsOfKernel()
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    module = types.SimpleNamespace(flash_attn_varlen_func=kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    packed = {"varlen": attention.packed_varlen, "flash": attention.packed_flash}[name]
    rows = Rows.of(batch_of([LONG, LONG, SHORT, OTHER, LONG, SHORT, LONG]))
    shared = share_prompts(pack(rows), rows)
    num_tokens = shared.input_ids.size(1)
    query, key, value = torch.randn(3, 1, 2, num_tokens, 8)
    attend = attention.packed_attention(packed)
    output, _ = attend(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        cu_seqlens=shared.cu_seqlens,
        sequence_lengths=torch.tensor(shared.sequence_lengths),
        key_places=shared.token_places,
        query_lengths=torch.tensor(shared.query_lengths),
        cu_queries=shared.cu_queries,
    )
    assert output.shape == (1, num_tokens, 2, 8)
    starts_of_queries, starts_of_keys, most_queries, most_keys = kernel.arguments
    assert starts_of_queries.diff().tolist() == shared.query_lengths
    assert starts_of_keys.diff().tolist() == rows.lengths_B.tolist()
    assert most_queries == max(shared.query_lengths)
    assert most_keys == rows.lengths_B.max()


def test_the_model_hands_the_bounds_of_queries_on(monkeypatch):
    _reference, hf = reference_and_packed(FAMILIES["llama"])
    seen = []

    def kernel(query, key, value, sequences):
        seen.append(sequences)
        return query.transpose(1, 2)

    AttentionInterface.register("packed_seen", attention.packed_attention(kernel))
    hf.set_attn_implementation("packed_seen")
    rows, _whole, shared = packed_both_ways(batch_of())
    PolicyModel(hf).hidden_states(shared)
    for sequences in seen:
        assert sequences.queries.lengths == sequences.queries.cu_seqlens.diff().tolist()
        assert sequences.lengths == sequences.cu_seqlens.diff().tolist() == rows.lengths_B.tolist()
    assert len(seen) == 2


def test_runs_have_consecutive_samples_of_one_prompt_up_to_a_size():
    prompts = [4, 4, 4, 4, 7, 4, 4]
    sizes = [2, 3, 2, 9, 1, 1, 1]
    runs = runs_of_prompts(prompts, sizes, largest=5)
    # 2 + 3 fill a run, 2 + 9 do not fit into one, and 9 alone is too large and still a run.
    assert [run.tolist() for run in runs] == [[0, 1], [2], [3], [4], [5, 6]]
    assert runs_of_prompts([], [], largest=5) == []


def test_ranks_get_the_samples_of_a_prompt_together_as_long_as_there_are_enough_of_them():
    prompts = np.array([0] * 4 + [4] * 4 + [8] * 4 + [12] * 4 + [16, 17] + [18] * 6 + [24] * 8)
    work = [1.0] * 16 + [2.0] * 16
    shares = rank_shares(32, 16, num_ranks=1, work_S=work, prompts_S=prompts)
    assert shares[0].tolist() == list(range(32))
    # Four runs of a rank, of two samples each: in the first step 16 / (4 * 2) = 2.
    of_ranks = rank_shares(32, 16, num_ranks=2, work_S=work, prompts_S=prompts)
    for share in of_ranks:
        assert len(share) == 16 and sum(work[sample] for sample in share) == 24
        pairs = [pair for pair in share.reshape(-1, 2).tolist() if not {16, 17} & set(pair)]
        assert len(pairs) >= 6
        assert all(first % 2 == 0 and second == first + 1 for first, second in pairs)
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
