"""The load of a mixture's experts, the loss that balances it, and frozen routers."""

from functools import partial

import pytest
import torch
from tiny_experts import (
    CONFIGS,
    NUM_EXPERTS,
    NUM_ROUTERS,
    TOP_K,
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
    write_model,
)
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.row_ops import jagged_from_offsets, jagged_parts
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.run.router_load import split_load
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.models import ModelConfig
from verl_like.workers.config.supervised import SFTTrainingConfig, SupervisedModelConfig
from verl_like.workers.models.experts import experts_notes
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.pretrained import empty_model, load_hf_config
from verl_like.workers.models.router_replay import require_balance
from verl_like.workers.supervised import SFTWorker

COEFFICIENT = 0.5


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return {family: write_experts(folder / family, family) for family in CONFIGS}


def updated(path: str, data: DataProto, **settings):
    """The gradients, the metrics and the load of one update."""
    group = local_group(ActorWorker, policy_config(path, **settings))
    gradients, output = gradients_of(group.workers[0], lambda: group.update_actor(data).get())
    metrics, load = split_load(metric_values(output.meta_info["metrics"]))
    return gradients, metrics, torch.tensor(load)


def difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of any value, as a share of the norm of all gradients."""
    norm = torch.stack([each.norm() for each in expected.values()]).norm()
    largest = max((got[name] - each).abs().max() for name, each in expected.items())
    return float(largest / norm)


def rows_of(data: DataProto) -> list[torch.Tensor]:
    """The tokens of each row."""
    columns = data.batch
    pairs = zip(columns["prompts"].unbind(), columns["responses"].unbind(), strict=True)
    return [torch.cat(pair) for pair in pairs]


def reference(path: str, data: DataProto) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Loss, counts by layer and expert, and gradients of the loss, by transformers."""
    hf = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager"
    ).double()
    logits: list[list[torch.Tensor]] = []
    for tokens in rows_of(data):
        outputs = hf(tokens[None], output_router_logits=True)
        logits.append([each.flatten(0, -2) for each in outputs.router_logits])
    of_layers = tuple(torch.cat(rows) for rows in zip(*logits, strict=True))
    loss = load_balancing_loss_func(of_layers, NUM_EXPERTS, TOP_K)
    loss.backward()
    counts = [each.topk(TOP_K).indices.flatten().bincount(minlength=8) for each in of_layers]
    gradients = {name: p.grad.float() for name, p in hf.named_parameters() if p.grad is not None}
    return loss.detach(), torch.stack(counts), gradients


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_load_and_balancing_loss_are_those_of_transformers_over_the_whole_batch(paths, family):
    data = make_batch(rows=7)
    plain, metrics, _ = updated(paths[family], data, micro=3)
    assert "actor/router_aux_loss" not in metrics
    gradients, metrics, load = updated(
        paths[family], data, micro=3, router_aux_loss_coef=COEFFICIENT
    )
    loss, counts, expected = reference(paths[family], data)
    assert torch.equal(load, counts.double())
    assert metrics["actor/router_aux_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["actor/loss"] == pytest.approx(
        metrics["actor/pg_loss"] + COEFFICIENT * loss.item(), rel=1e-6
    )
    of_loss = {name: (gradients[name] - plain[name]) / COEFFICIENT for name in expected}
    assert difference(of_loss, expected) < 1e-5
    assert any(name.endswith(("gate.weight", "router.weight")) for name in expected)


@pytest.mark.parametrize("micro", [{"micro": 1}, {"micro": 2}, {"budget": 40}])
def test_loss_and_gradients_are_the_same_for_all_micro_batches(paths, micro):
    data = make_batch(rows=7)
    settings = {"router_aux_loss_coef": COEFFICIENT}
    expected, whole, load = updated(paths["qwen3_moe"], data, **settings)
    gradients, metrics, same_load = updated(paths["qwen3_moe"], data, **settings, **micro)
    assert torch.equal(load, same_load)
    for name in ("actor/router_aux_loss", "actor/loss"):
        assert metrics[name] == pytest.approx(whole[name], rel=1e-6)
    assert difference(gradients, expected) < 1e-6


def test_replayed_routing_counts_in_the_load_and_where_it_has_a_record_in_the_loss(paths):
    data = make_batch(rows=7)
    ids, offsets = jagged_parts(drawn_routing(data, "mixtral"))
    last = offsets[1:] - 1
    ids[last] = -1
    data = with_routing(data, jagged_from_offsets(ids, offsets))
    settings = {"router_replay": {"mode": "R2"}, "router_aux_loss_coef": COEFFICIENT}
    expected, whole, load = updated(paths["mixtral"], data, **settings)
    recorded = ids[ids[:, 0, 0] >= 0].long()
    assert load.sum() == ids.numel()
    counts = torch.stack([recorded[:, layer].flatten().bincount(minlength=8) for layer in (0, 1)])
    assert bool((load >= counts).all()) and int(load.sum() - counts.sum()) == 7 * 2 * TOP_K
    gradients, metrics, _ = updated(paths["mixtral"], data, micro=2, **settings)
    assert metrics["actor/router_aux_loss"] == pytest.approx(
        whole["actor/router_aux_loss"], rel=1e-6
    )
    assert difference(gradients, expected) < 1e-6


def test_rows_without_a_scored_token_do_not_count(paths):
    data = make_batch(rows=7)
    masks, offsets = jagged_parts(data.batch["response_mask"])
    masks = masks.clone()
    masks[: offsets[2]] = 0
    data.batch["response_mask"] = jagged_from_offsets(masks, offsets)
    _, _, load = updated(paths["mixtral"], data, micro=2)
    lengths = Rows.of(data).lengths_B
    assert load.sum() == lengths[2:].sum() * NUM_ROUTERS["mixtral"] * TOP_K


def test_metrics_of_the_load_are_those_of_its_shares():
    row = {"actor/loss": 0.5}
    for layer, counts in enumerate([[6, 2, 0, 0], [2, 2, 2, 2]]):
        row |= {f"router_load/count/{layer}/{e}": float(each) for e, each in enumerate(counts)}
    metrics, load = split_load(row)
    assert load == [[6, 2, 0, 0], [2, 2, 2, 2]]
    # Of the first layer: -(3/4 ln 3/4 + 1/4 ln 1/4) / ln 4 = 0.40564
    assert metrics == {
        "actor/loss": 0.5,
        "router_load/max_over_mean": 3.0,
        "router_load/entropy": pytest.approx((0.40564 + 1) / 2, abs=1e-5),
    }
    assert split_load({"actor/loss": 0.5}) == ({"actor/loss": 0.5}, [])


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_computed_by_one_product_or_as_asked_in_a_loop_with_the_same_result(
    paths, family
):
    data = make_batch(rows=7)
    gradients = {}
    for requested, used in ((None, "grouped_mm"), ("eager", "eager")):
        overrides = {"experts_implementation": requested}
        settings = policy_config(paths[family]).updated({"model.override_config": overrides})
        group = local_group(ActorWorker, settings)
        worker = group.workers[0]
        assert worker.engine.model.hf.config._experts_implementation == used
        update = partial(group.update_actor, data)
        gradients[used], _ = gradients_of(worker, lambda run=update: run().get())
    assert difference(gradients["eager"], gradients["grouped_mm"]) < 1e-6


def test_the_start_says_how_experts_are_computed_and_refuses_what_a_model_lacks(paths, tmp_path):
    dense = write_model(tmp_path)
    notes = {}
    for name, path in (("dense", dense), ("experts", paths["qwen3_moe"])):
        config = ModelConfig(path=path, override_config={"experts_implementation": "eager"})
        hf_config = load_hf_config(config, key="m")
        notes[name] = experts_notes(config, hf_config, AutoModelForCausalLM, "m")
    assert notes == {"dense": [], "experts": ["Experts of m: eager"]}
    config = ModelConfig(path=dense, override_config={"experts_implementation": "grouped_mm"})
    message = "m.override_config.experts_implementation=grouped_mm, but LlamaForCausalLM has no"
    with pytest.raises(ValueError, match=message):
        empty_model(config, AutoModelForCausalLM, key="m")


def test_dense_models_have_no_load_and_refuse_to_be_balanced(tmp_path):
    path = write_model(tmp_path)
    _, metrics, load = updated(path, make_batch())
    assert not len(load) and not any(name.startswith("router_load") for name in metrics)
    with pytest.raises(
        WorkerError, match=r"ValueError: router_aux_loss_coef=0.5 balances the experts of"
    ):
        updated(path, make_batch(), router_aux_loss_coef=COEFFICIENT)


def test_families_with_correction_biases_are_not_balanced_by_the_loss(paths):
    hf = AutoModelForCausalLM.from_config(CONFIGS["glm4_moe"])
    with pytest.raises(ValueError, match="Glm4MoeForCausalLM has no router_aux_loss_coef"):
        require_balance(hf)
    require_balance(AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"]))
    biases = "e_score_correction_bias"
    group = local_group(ActorWorker, policy_config(paths["glm4_moe"]))
    worker = group.workers[0]
    before = {n: b.clone() for n, b in worker.engine.named_buffers() if n.endswith(biases)}
    group.update_actor(make_batch(rows=7)).get()
    after = dict(worker.engine.named_buffers())
    assert len(before) == 2 and all(torch.equal(after[name], each) for name, each in before.items())


def sft_updated(path: str, data: DataProto, micro: int, **training):
    """The gradients, the metrics and the load of a step of fine-tuning."""
    model = SupervisedModelConfig(path=path, fsdp_config={"dtype": "float32"})
    settings = SFTTrainingConfig(
        use_dynamic_bsz=False, micro_batch_size_per_gpu=micro, grad_clip=1e6, **training
    )
    group = LocalWorkerGroup(ClassWithInitArgs(SFTWorker, model, settings, 7, 3, 0))
    group.init_model()
    gradients, output = gradients_of(group.workers[0], lambda: group.update_model(data).get())
    metrics, load = split_load(metric_values(output.meta_info["metrics"]))
    return gradients, metrics, torch.tensor(load)


def test_fine_tuning_balances_with_the_weight_of_the_models_configuration(paths):
    path = paths["qwen3_moe"]
    data = make_batch(rows=7).select(batch_keys=["prompts", "responses", "response_mask"])
    own_weight = CONFIGS["qwen3_moe"].router_aux_loss_coef
    assert own_weight == 0.001
    loss, counts, _ = reference(path, data)
    plain, unbalanced, load = sft_updated(path, data, 3, router_aux_loss_coef=0)
    assert torch.equal(load, counts.double()) and "sft/router_aux_loss" not in unbalanced
    gradients, metrics, _ = sft_updated(path, data, 3)
    assert metrics["sft/router_aux_loss"] == pytest.approx(loss.item(), rel=1e-6)
    added = metrics["sft/loss"] - unbalanced["sft/loss"]
    assert added == pytest.approx(own_weight * loss.item(), rel=1e-3)
    other, _, _ = sft_updated(path, data, 2)
    assert difference(other, gradients) < 1e-6 < difference(plain, gradients)


def test_frozen_routers_stay_as_they_are_and_all_else_is_trained(paths, tmp_path):
    path = paths["gpt_oss"]
    data = make_batch(rows=7)
    group = local_group(ActorWorker, policy_config(path, freeze_router=True))
    worker = group.workers[0]
    before = parameters_of(worker)
    group.update_actor(data).get()
    after = parameters_of(worker)
    unchanged = {name for name, each in after.items() if torch.equal(each, before[name])}
    routers = {name for name in before if ".router." in name}
    assert len(routers) == 2 * NUM_ROUTERS["gpt_oss"] and unchanged == routers
    export = worker.export_weights(version=1)
    sent = {name for bucket in export.buckets for name in bucket.names}
    assert routers <= sent
    group.save_checkpoint(str(tmp_path))
    group.update_actor(data).get()
    once_more = parameters_of(worker)
    resumed = local_group(ActorWorker, policy_config(path, freeze_router=True))
    resumed.load_checkpoint(str(tmp_path))
    assert difference(parameters_of(resumed.workers[0]), after) == 0
    resumed.update_actor(data).get()
    assert difference(parameters_of(resumed.workers[0]), once_more) == 0
