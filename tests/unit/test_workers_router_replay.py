"""The trainer replays the routing of experts: equal to a computation by hand, with each family's
own weights and gradients."""

import json
from pathlib import Path

import pytest
import torch
from tiny_experts import (
    CONFIGS,
    NUM_ROUTERS,
    TOP_K,
    RoutedReference,
    drawn_routing,
    with_routing,
    write_experts,
)
from tiny_worker_models import (
    gradients_of,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    relative_error,
    write_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from verl_like.protocol import DataProto, metric_values, pad_dataproto_to_divisor, unpad_dataproto
from verl_like.protocol.padded import strip, view_of_samples
from verl_like.protocol.row_ops import deep_equal, jagged_from_offsets, jagged_parts
from verl_like.protocol.wire import from_wire, to_wire
from verl_like.workers.actor import ActorWorker
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.routed_experts import RouterShape, Routing, check_routing, count_own
from verl_like.workers.models.router_replay import attach_replay, require_replay, routers_of
from verl_like.workers.reference import ReferenceWorker, ReplayingReferenceWorker

R2 = {"router_replay": {"mode": "R2"}}


@pytest.fixture(scope="module", params=CONFIGS)
def path(request, tmp_path_factory):
    return write_experts(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return write_experts(tmp_path_factory.mktemp("mixtral"), "mixtral")


def family_of(path: str) -> str:
    return json.loads(Path(path, "config.json").read_text())["model_type"]


def rows_without_old(rows: int = 7) -> DataProto:
    """A batch whose update is one step, so that its loss is -advantage * log_prob."""
    data = make_batch(rows=rows)
    return data.select(batch_keys=["prompts", "responses", "response_mask", "advantages"])


def replayed_log_probs(path: str, data: DataProto, micro: int = 8) -> list[torch.Tensor]:
    """The log-probabilities that an update of rows with routing computes."""
    config = policy_config(path, prompts=len(data), micro=micro, **R2)
    group = local_group(ActorWorker, config)
    worker = group.workers[0]
    kept = []

    def keep(*arguments, **options):
        kept.append(score(*arguments, **options))
        return kept[-1]

    score = worker.score_tokens
    worker.score_tokens = keep
    group.update_actor(data).get()
    return torch.cat([values[0].detach() for values in kept])


def far_apart(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() > 1e-3)


def test_the_routing_that_compute_log_prob_records_is_replayed_without_a_difference(path):
    data = make_batch(rows=7)
    plain = local_group(ActorWorker, policy_config(path, micro=3))
    group = local_group(ActorWorker, policy_config(path, micro=3, **R2))
    scored = group.compute_log_prob(data).get()
    unrecorded = plain.compute_log_prob(data).get()
    assert deep_equal(scored.batch["old_log_probs"], unrecorded.batch["old_log_probs"])
    column = scored.batch["routed_experts"]
    ids, offsets = jagged_parts(column)
    assert ids.dtype == torch.int8 and ids.shape[1:] == (NUM_ROUTERS[family_of(path)], TOP_K)
    assert torch.equal(offsets.diff(), Rows.of(data).lengths_B) and ids.min() >= 0
    gradients, _ = gradients_of(
        group.workers[0], lambda: group.update_actor(with_routing(data, column)).get()
    )
    expected, _ = gradients_of(plain.workers[0], lambda: plain.update_actor(data).get())
    assert relative_error(gradients, expected) < 1e-6
    after, expected = parameters_of(group.workers[0]), parameters_of(plain.workers[0])
    assert relative_error(after, expected) < 1e-6


@pytest.mark.parametrize("micro", [8, 3])
def test_another_routing_gives_log_probs_and_gradients_of_a_computation_by_hand(path, micro):
    """In packed micro-batches whose layers are computed again in the backward pass."""
    data = rows_without_old()
    data = with_routing(data, drawn_routing(data, family_of(path)))
    reference = RoutedReference(path)
    log_probs = reference.log_probs(data)
    loss = 0.0
    for row, of_row in enumerate(log_probs):
        loss = loss - (of_row * data.batch["advantages"][row].double()).sum()
    (loss / data.batch["response_mask"].values().sum()).backward()
    assert replayed_log_probs(path, data) == pytest.approx(torch.cat(log_probs).detach(), abs=2e-5)
    expected = {
        name: each.grad.float()
        for name, each in reference.hf.named_parameters()
        if each.grad is not None
    }
    assert any(name.endswith(("gate.weight", "router.weight")) for name in expected)
    config = policy_config(path, micro=micro, **R2)
    assert config.model.enable_gradient_checkpointing
    group = local_group(ActorWorker, config)
    gradients, _ = gradients_of(group.workers[0], lambda: group.update_actor(data).get())
    assert relative_error(gradients, expected) < 2e-5


def test_a_routing_of_the_next_layer_or_token_or_with_another_expert_gives_other_log_probs(mixtral):
    data = rows_without_old()
    column = drawn_routing(data, "mixtral")
    ids, offsets = jagged_parts(column)
    right = replayed_log_probs(mixtral, with_routing(data, column))
    other_expert = ids.clone()
    token = int(offsets[1]) - 2
    absent = set(range(8)) - set(ids[token, 1].tolist())
    other_expert[token, 1, 2] = min(absent)
    for wrong in (ids.roll(1, 1), ids.roll(1, 0), other_expert):
        changed = with_routing(data, jagged_from_offsets(wrong, offsets))
        assert far_apart(replayed_log_probs(mixtral, changed), right)
    in_other_order = with_routing(data, jagged_from_offsets(ids.roll(1, 2), offsets))
    same = replayed_log_probs(mixtral, in_other_order)
    assert same == pytest.approx(right, abs=1e-5)  # each expert keeps its weight


def test_a_token_without_a_record_has_the_routing_of_the_model(mixtral):
    data = rows_without_old()
    group = local_group(ActorWorker, policy_config(mixtral, **R2))
    own, offsets = jagged_parts(group.compute_log_prob(data).get().batch["routed_experts"])
    drawn, _ = jagged_parts(drawn_routing(data, "mixtral"))
    # Of each row the tokens before the third have no record.
    place = torch.arange(len(own)) - offsets[:-1].repeat_interleave(offsets.diff())
    unrecorded = (place < 3)[:, None, None]
    with_gaps = jagged_from_offsets(drawn.masked_fill(unrecorded, -1), offsets)
    all_own = jagged_from_offsets(torch.full_like(own, -1), offsets)
    plain = replayed_log_probs(mixtral, with_routing(data, all_own))
    expected = replayed_log_probs(mixtral, with_routing(data, jagged_from_offsets(own, offsets)))
    assert torch.equal(plain, expected)
    got = replayed_log_probs(mixtral, with_routing(data, with_gaps))
    assert far_apart(got, plain)
    # A token attends only to tokens before it, which are as in the model's own routing.
    filled = torch.where(unrecorded, own, drawn)
    assert got == pytest.approx(
        replayed_log_probs(mixtral, with_routing(data, jagged_from_offsets(filled, offsets))),
        abs=1e-5,
    )


SHAPE = RouterShape(num_layers=2, num_experts=8, top_k=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:, :1], r"\(layers, experts of a token\) = \(1, 3\), but .* by \(2, 3\)"),
        (lambda ids: ids[..., :2], r"= \(2, 2\), but the model routes by \(2, 3\)"),
        (
            lambda ids: ids.index_fill(0, torch.tensor([4]), 8),
            r"of token 1 of row 1 in layer 0 of 2 routers is \[8, 8, 8\]: expected 3 different",
        ),
        (lambda ids: ids.index_fill(2, torch.tensor([1]), -1), "of token 0 of row 0 in layer 0"),
        (lambda ids: ids.index_fill(2, torch.tensor([0, 2]), 5), r"is \[5, \d, 5\]"),
    ],
)
def test_routing_that_is_not_the_models_is_refused_with_row_and_layer(change, message):
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(7, 2, 8, generator=generator).argsort(-1)[..., :3].to(torch.int8)
    lengths = torch.tensor([3, 4])
    offsets = torch.tensor([0, 3, 7])
    check_routing(jagged_from_offsets(ids, offsets), lengths, SHAPE)
    ids[5] = -1  # without a record
    check_routing(jagged_from_offsets(ids, offsets), lengths, SHAPE)
    with pytest.raises(ValueError, match=message):
        check_routing(jagged_from_offsets(change(ids), offsets), lengths, SHAPE)
    with pytest.raises(ValueError, match="has 4 tokens in row 1, whose prompt and response have 5"):
        check_routing(jagged_from_offsets(ids, offsets), torch.tensor([3, 5]), SHAPE)


@pytest.mark.parametrize("num_experts", [127, 128, 129, 256, 300])
def test_any_number_of_experts_fits_the_type_of_the_column_and_those_beyond_are_refused(
    num_experts,
):
    shape = RouterShape(num_layers=1, num_experts=num_experts, top_k=2)
    offsets = torch.tensor([0, 2])

    def check(largest):
        ids = torch.tensor([[[0, largest]], [[largest, 3]]], dtype=shape.dtype)
        check_routing(jagged_from_offsets(ids, offsets), torch.tensor([2]), shape)

    check(num_experts - 1)
    beyond = min(num_experts, torch.iinfo(shape.dtype).max)
    if beyond == num_experts:
        with pytest.raises(ValueError, match=rf"is \[0, {num_experts}\]: expected 2 different"):
            check(beyond)


def test_an_update_without_the_routing_it_should_replay_is_refused(mixtral):
    group = local_group(ActorWorker, policy_config(mixtral, **R2))
    with pytest.raises(Exception, match=r"router_replay.mode=R2\), and its batch has no column"):
        group.update_actor(make_batch(rows=2)).get()


def test_routing_for_a_model_that_does_not_replay_is_refused(mixtral):
    data = rows_without_old()
    group = local_group(ActorWorker, policy_config(mixtral))
    with pytest.raises(Exception, match="given the routing of experts, and the model of this role"):
        group.update_actor(with_routing(data, drawn_routing(data, "mixtral"))).get()


def test_the_smallest_type_holds_the_ids_and_the_mark_of_no_record():
    assert RouterShape(2, 128, 8).dtype == torch.int8
    assert RouterShape(2, 129, 8).dtype == torch.int16
    assert RouterShape(48, 128, 8).token_bytes == 384
    # A value: equal ones are one key.
    assert {RouterShape(2, 128, 8), RouterShape(2, 128, 8), RouterShape(2, 129, 8)} == {
        RouterShape(2, 128, 8),
        RouterShape(2, 129, 8),
    }


def test_tokens_without_a_record_are_counted_also_of_a_model_with_one_router():
    rows = [torch.tensor([[[3, 1]], [[-1, -1]]]), torch.tensor([[[-1, -1]]])]
    column = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert count_own(column) == 2


def test_a_pass_whose_routers_did_not_run_says_how_many_did():
    with pytest.raises(ValueError, match="routers of 0 layers of 0 have run"):
        Routing(None).require_all(None)
    with pytest.raises(ValueError, match="routers of 0 layers of 3 have run"):
        Routing(None).require_all(RouterShape(3, 8, 2))


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_routers_that_can_replay_are_found_by_a_trial_and_others_refused(tmp_path):
    for family, config in CONFIGS.items():
        assert require_replay(on_meta(config)) == RouterShape(NUM_ROUTERS[family], 8, 3)
    dense = AutoConfig.from_pretrained(write_model(tmp_path / "dense"))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        require_replay(on_meta(dense))
    tiny = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
    unknown = AutoConfig.for_model(
        "phimoe", **tiny, num_attention_heads=2, num_key_value_heads=1, num_local_experts=4
    )
    with pytest.raises(ValueError, match=r"PhimoeTopKRouter gives .* selects in another way"):
        require_replay(on_meta(unknown))
    masked = AutoConfig.for_model(
        "deepseek_v2",
        **tiny,
        num_attention_heads=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        moe_intermediate_size=8,
    )
    with pytest.raises(ValueError, match="DeepseekV2TopkRouter gives experts that it did not"):
        require_replay(on_meta(masked))


def test_a_router_that_selects_twice_in_a_pass_is_refused():
    hf = AutoModelForCausalLM.from_config(CONFIGS["mixtral"])
    router = next(iter(routers_of(hf).values()))
    once = router.forward

    def twice(hidden):
        once(hidden)
        return once(hidden)

    router.forward = twice
    attach_replay(hf)
    with pytest.raises(ValueError, match="MixtralTopKRouter selected 2 times, which router replay"):
        hf.base_model(torch.tensor([[3, 4]]), **Routing(None).arguments)


def test_the_column_survives_what_happens_to_a_batch_on_its_way(tmp_path):
    data = rows_without_old(6)
    column = drawn_routing(data, "qwen3_moe").to(torch.int16)
    whole = with_routing(data, column)
    ways = {
        "parts": DataProto.concat(whole.chunk(3)),
        "rows": whole.select_idxs([5, 0, 1, 2, 3, 4]).select_idxs([1, 2, 3, 4, 5, 0]),
        "message": with_routing(data, from_wire(to_wire(column))),
        "view": strip(view_of_samples(whole), whole),
    }
    filled, count = pad_dataproto_to_divisor(whole, 4)
    ways["padding"] = unpad_dataproto(filled, count)
    whole.save_to_disk(tmp_path / "rows")
    ways["file"] = DataProto.load_from_disk(tmp_path / "rows")
    for way, arrived in ways.items():
        assert deep_equal(arrived.batch["routed_experts"], column), way


R3 = {"router_replay": {"mode": "R3"}}


def test_the_engines_routing_is_replayed_by_actor_and_reference_and_differences_are_reported(
    mixtral,
):
    """The reference has the same weights, so with the same routing it computes the same."""
    data = rows_without_old(20)
    plain = local_group(ActorWorker, policy_config(mixtral))
    own, offsets = jagged_parts(
        local_group(ActorWorker, policy_config(mixtral, **R2))
        .compute_log_prob(data)
        .get()
        .batch["routed_experts"]
    )
    ids, _ = jagged_parts(drawn_routing(data, "mixtral"))
    # Rows 0 to 9 have the model's own routing, in another order. Of the others the first layer has
    # it, and the last token of row 10 has no record.
    ids[: int(offsets[10])] = own[: int(offsets[10])]
    ids[:, 0] = own[:, 0]
    ids = ids.roll(1, -1)
    ids[int(offsets[11]) - 1] = -1
    column = jagged_from_offsets(ids, offsets)
    routed = with_routing(data, column)
    without = plain.compute_log_prob(data).get().batch["old_log_probs"]
    config = policy_config(mixtral, micro=3, **R3)
    replayed = replayed_log_probs(mixtral, routed)
    output = local_group(ActorWorker, config).compute_log_prob(routed).get()
    assert "routed_experts" not in output.batch
    assert output.batch["old_log_probs"].values() == pytest.approx(replayed, abs=1e-5)
    metrics = metric_values(output.meta_info["metrics"])
    num_tokens = len(ids) - 1
    # The second layer's own selection is by the hidden states that the replay has made.
    reference = RoutedReference(mixtral)
    selected = torch.cat(reference.own_selection(routed, layer=1)).sort(-1).values
    recorded = (ids[:, 1].long() >= 0).all(-1)
    differs = (selected != ids[:, 1].long().sort(-1).values).any(-1) & recorded
    assert 0 < int(differs.sum()) < num_tokens
    share = int(differs.sum()) / num_tokens
    assert metrics["router_replay/tokens_differ"] == pytest.approx(share)
    assert metrics["router_replay/routers_differ"] == pytest.approx(share / 2)
    plain_rows = output.batch["unreplayed_log_probs"]
    for row in range(20):
        if row in (0, 16):
            assert plain_rows[row] == pytest.approx(without[row], abs=1e-6)
        else:
            assert plain_rows[row].isnan().all()
    assert far_apart(plain_rows[16], output.batch["old_log_probs"][16])
    for mode, expected_log_probs in (("R3", replayed), ("disabled", without.values())):
        policy = policy_config(mixtral, **R3)
        replay = policy.ref.router_replay.model_copy(update={"mode": mode})
        ref = policy.ref.model_copy(update={"router_replay": replay})
        worker_class = ReplayingReferenceWorker if mode == "R3" else ReferenceWorker
        group = local_group(worker_class, policy.model_copy(update={"ref": ref}))
        log_probs = group.compute_ref_log_prob(routed).get().batch["ref_log_prob"].values()
        assert log_probs == pytest.approx(expected_log_probs, abs=1e-5)


def test_the_actor_refuses_to_score_without_the_engines_routing(mixtral):
    group = local_group(ActorWorker, policy_config(mixtral, **R3))
    with pytest.raises(Exception, match=r"router_replay.mode=R3\), and its batch has no column"):
        group.compute_log_prob(rows_without_old(2)).get()
