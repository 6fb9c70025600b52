"""Actor and critic on one rank: losses and gradients against float64, invariances, skipped steps,
saving."""

import math

import pytest
import torch
from safetensors.torch import load_file
from tiny_worker_models import (
    RESPONSE,
    critic_config,
    gradients_of,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    relative_error,
    reward_config,
    write_model,
    write_reward_model,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl_like.algorithms.aggregation import BatchCounts, agg_loss
from verl_like.algorithms.policy_losses import POLICY_LOSSES, register_policy_loss
from verl_like.protocol import DataProto, merge_metrics, metric_values
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import jagged_parts
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.failure import WorkerError
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.engine import micro_batch
from verl_like.workers.engine.mini_batches import MicroBatch, MiniBatch
from verl_like.workers.models.packing import Rows
from verl_like.workers.reference import ReferenceWorker, ReplayingReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "policy")


def actor_group(path, **settings):
    return local_group(ActorWorker, policy_config(path, **settings))


def critic_group(path, **settings):
    return local_group(CriticWorker, critic_config(path, **settings), seed=1)


def update(group, data):
    """Metrics of one update."""
    call = group.update_actor if isinstance(group.workers[0], ActorWorker) else group.update_critic
    return metric_values(call(data).get().meta_info["metrics"])


def padded_output(data, output):
    """The columns that a worker returned of a batch, (B, R) each."""
    beside = data.select(batch_keys=["prompts", "responses"]).union(output)
    return padded(beside, names=list(output.tensors())).batch


def reference_policy_loss(hf, data, entropy_coeff=0.0, kl_coef=0.0):
    """The actor's objective by the book, row by row without padding: token-mean of clipped
    surrogate, entropy, k3."""
    rows, total = padded(data).batch, 0.0
    for row in range(len(data)):
        tokens = rows["input_ids"][row][rows["attention_mask"][row].bool()][None]
        count = int(rows["response_mask"][row].sum())
        log_probs_all = torch.log_softmax(hf(tokens).logits[0, -count - 1 : -1] / 0.7, dim=-1)
        log_prob = log_probs_all.gather(-1, tokens[0, -count:, None])[:, 0]
        entropy = -(log_probs_all.exp() * log_probs_all).sum(-1)
        old, ref, advantage = (
            rows[name][row, :count].double()
            for name in ("old_log_probs", "ref_log_prob", "advantages")
        )
        ratio = (log_prob - old).exp()
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        surrogate = torch.where(advantage < 0, torch.minimum(surrogate, -3 * advantage), surrogate)
        kl = ((ref - log_prob).exp() - (ref - log_prob) - 1).clamp(-10, 10)
        total = total + (surrogate - entropy_coeff * entropy + kl_coef * kl).sum()
    return total / rows["response_mask"].sum()


def test_the_actor_loss_and_its_gradient_are_those_of_a_float64_reference(model_path):
    data = make_batch()
    group = actor_group(model_path, micro=3, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    gradients, metrics = gradients_of(group.workers[0], lambda: update(group, data))
    hf = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager").double()
    loss = reference_policy_loss(hf, data, entropy_coeff=0.01, kl_coef=0.1)
    loss.backward()
    expected = {name: parameter.grad.float() for name, parameter in hf.named_parameters()}
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative_error(gradients, expected) < 1e-5
    norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in hf.parameters()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_critic_loss_is_half_the_mean_clipped_squared_error(model_path):
    data = make_batch()
    group = critic_group(model_path, micro=3)
    columns = padded(data).batch
    mask = columns["response_mask"].bool()
    new, old, target = (
        column[mask].double()
        for column in (
            padded_output(data, group.compute_values(data).get())["values"],
            columns["values"],
            columns["returns"],
        )
    )
    clipped = old + (new - old).clamp(-0.5, 0.5)
    expected = 0.5 * torch.maximum((new - target) ** 2, (clipped - target) ** 2).mean().item()
    metrics = update(group, data)
    assert metrics["critic/vf_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["critic/vpred_mean"] == pytest.approx(new.mean().item(), rel=1e-5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_gradient_is_the_same_for_every_micro_batch_size_and_token_budget(model_path, mode):
    data, results = make_batch(), []
    for size in ({"micro": 8}, {"micro": 3}, {"micro": 1}, {"budget": 11}, {"budget": 30}):
        group = actor_group(model_path, loss_agg_mode=mode, entropy_coeff=0.01, **size)
        results.append(gradients_of(group.workers[0], lambda group=group: update(group, data)))
    for gradients, metrics in results[1:]:
        assert relative_error(gradients, results[0][0]) < 2e-6
        for name in (
            "actor/pg_loss",
            "actor/pg_clipfrac",
            "actor/ppo_kl",
            "actor/entropy_loss",
            "actor/grad_norm",
        ):
            assert metrics[name] == pytest.approx(results[0][1][name], rel=1e-5)


def test_scores_come_back_in_the_order_of_the_rows_whatever_the_budget(model_path, tmp_path):
    data = make_batch()
    reward_path = write_reward_model(tmp_path / "reward")
    by_tokens = {"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 11}

    def scores(budget, **settings):
        reference = local_group(ReferenceWorker, policy_config(model_path, budget=budget))
        critic = critic_group(model_path, **settings)
        reward_model = local_group(RewardModelWorker, reward_config(reward_path, **settings))
        calls = (
            reference.compute_ref_log_prob,
            critic.compute_values,
            reward_model.compute_rm_score,
        )
        return [
            column for call in calls for column in padded_output(data, call(data).get()).values()
        ]

    for column, expected in zip(scores(11, **by_tokens), scores(None), strict=True):
        torch.testing.assert_close(column, expected, rtol=1e-6, atol=1e-6)


def test_a_sample_of_several_rows_that_is_longer_than_a_pass_may_be_has_one_of_its_own(model_path):
    batch = make_batch(rows=4)
    batch.batch["sample_id"] = torch.tensor([0, 0, 0, 1])
    first_three = Rows.of(batch).lengths_B[:3].sum()
    assert first_three > 11
    norms = [
        metric_values(
            actor_group(model_path, budget=budget, prompts=2)
            .update_actor(batch)
            .get()
            .meta_info["metrics"]
        )
        for budget in (11, 100)
    ]
    assert norms[0]["actor/grad_norm"] == pytest.approx(norms[1]["actor/grad_norm"], rel=1e-5)


def samples_of_several_rows():
    data = make_batch(rows=4)
    data.batch["sample_id"] = torch.tensor([7, 7, 3, 5])
    data.batch["weight"] = torch.tensor([0.5, 1.5, 2.5, 3.5])
    return data


def with_zeros(rows):
    """Lists that are filled with zeros to RESPONSE numbers, or to the length of the longest."""
    width = max(RESPONSE, *map(len, rows))
    return [row + [0.0] * (width - len(row)) for row in rows]


def test_a_loss_sees_the_columns_of_samples():
    data = samples_of_several_rows()
    micro = MicroBatch(Rows.of(data), "cpu")
    columns = micro.by_sample()
    assert columns["weight"].tolist() == [0.5, 2.5, 3.5], "of the first row of each"
    advantages = [row.tolist() for row in data.tensors()["advantages"].unbind()]
    expected = with_zeros([advantages[0] + advantages[1], advantages[2], advantages[3]])
    assert (
        columns["advantages"].tolist() == micro.of_samples(micro["advantages"]).tolist() == expected
    )


def test_a_loss_sees_rows_padded_to_the_same_width_and_what_was_put_in_beside_them():
    data = samples_of_several_rows()
    micro = MicroBatch(Rows.of(data), "cpu")
    advantages = [row.tolist() for row in data.tensors()["advantages"].unbind()]
    assert micro["advantages"].tolist() == with_zeros(advantages)
    assert set(micro) == set(micro.by_sample()) == set(data.tensors()) - {"prompts"}
    micro["twice"], micro["advantages"] = 2 * micro["advantages"], -micro["advantages"]
    del micro["weight"]
    columns = micro.by_sample()
    assert "weight" not in micro and "weight" not in columns and columns.get("weight") is None
    of_samples = with_zeros([advantages[0] + advantages[1], advantages[2], advantages[3]])
    assert torch.equal(columns["twice"], 2 * torch.tensor(of_samples))
    assert torch.equal(columns["advantages"], -torch.tensor(of_samples))


def test_what_a_model_returns_of_tokens_is_padded_by_row_and_by_sample_and_nothing_else_is():
    micro = MicroBatch(Rows.of(samples_of_several_rows()), "cpu")
    lengths = micro.on_host["responses"].offsets().diff().tolist()
    values = torch.arange(1.0, sum(lengths) + 1)
    rows = [part.tolist() for part in values.split(lengths)]
    assert micro.of_rows(values).tolist() == with_zeros(rows)
    by_sample = with_zeros([rows[0] + rows[1], rows[2], rows[3]])
    assert (
        micro.of_samples(values).tolist()
        == micro.of_samples(micro.of_rows(values)).tolist()
        == by_sample
    )
    assert torch.equal(micro.of_tokens(values), values) and torch.equal(
        micro.of_tokens(micro.of_rows(values)), values
    )
    with pytest.raises(
        ValueError, match=rf"have shape \(4,\): give one for each of these, \({sum(lengths)},\)"
    ):
        micro.of_samples(torch.zeros(4))


@pytest.fixture
def moved(monkeypatch):
    """The names of the columns of each micro-batch that were brought to the device, of each copy to
    it."""
    copies = []

    def to_device(tensors, device):
        copies.append(tensors.keys() & {"responses", "response_mask", "advantages", "returns"})
        return dict(tensors)

    monkeypatch.setattr(micro_batch, "to_device", to_device)
    return copies


def test_a_pass_without_gradients_brings_no_column_to_the_device_and_an_update_all_of_them_at_once(
    model_path, tmp_path, moved
):
    data, reward_model = make_batch(), reward_config(write_reward_model(tmp_path / "reward"))
    actor, critic = actor_group(model_path, micro=4), critic_group(model_path, micro=4)
    actor.compute_log_prob(data).get()
    critic.compute_values(data).get()
    local_group(RewardModelWorker, reward_model).compute_rm_score(data).get()
    assert moved == []
    update(actor, data)
    update(critic, data)
    assert moved == 2 * [{"responses", "response_mask", "advantages"}] + 2 * [
        {"responses", "response_mask", "returns"}
    ]


class PaddedActor(ActorWorker):
    """A user's subclass whose pass returns padded rows."""

    def score_tokens(self, micro, **options):
        return tuple(map(micro.of_rows, super().score_tokens(micro, **options)))


def test_a_subclass_may_return_padded_rows(model_path):
    data = make_batch()
    data.batch["sample_id"] = torch.tensor([0, 0, 1, 2, 3, 4, 5, 5])
    groups = [
        local_group(worker, policy_config(model_path, micro=3))
        for worker in (ActorWorker, PaddedActor)
    ]
    one, other = (padded_output(data, group.compute_log_prob(data).get()) for group in groups)
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    metrics = [update(group, data) for group in groups]
    assert metrics[0]["actor/grad_norm"] == metrics[1]["actor/grad_norm"]


class SequenceActor(ActorWorker):
    """A user's subclass whose objective sums over the tokens of each response, written for padded
    rows."""

    def policy_loss(self, micro, mini_batch):
        log_prob_bR, *_ = self._score(micro, with_entropy=False)
        return -(
            log_prob_bR.sum(-1) * micro["advantages"].sum(-1)
        ).sum() / mini_batch.num_sequences, {}


class SequenceCritic(CriticWorker):
    """The same with the values of a critic."""

    def value_loss(self, micro, mini_batch):
        error_b = (self._predict(micro) - micro["returns"]).sum(-1)
        return (error_b**2).sum() / mini_batch.num_sequences, {}


@pytest.mark.parametrize(
    ("worker", "config"), [(SequenceActor, policy_config), (SequenceCritic, critic_config)]
)
def test_an_objective_of_a_subclass_that_is_written_for_padded_rows_gets_them(
    worker, config, model_path
):
    data = make_batch()
    seed = {"seed": 1} if worker is SequenceCritic else {}
    norms = [
        update(local_group(worker, config(model_path, micro=m), **seed), data) for m in (8, 2, 1)
    ]
    key = "actor/grad_norm" if worker is SequenceActor else "critic/grad_norm"
    assert norms[0][key] > 0 and all(
        norm[key] == pytest.approx(norms[0][key], rel=1e-4) for norm in norms
    )


def test_the_objective_by_sequence_is_that_of_the_model_row_by_row(model_path):
    data = make_batch()
    rows = MicroBatch(Rows.of(data), "cpu")
    worker = local_group(SequenceActor, policy_config(model_path)).workers[0]
    mini_batch = MiniBatch(
        [], num_tokens=40.0, num_sequences=8.0, share=1.0, response_length=RESPONSE
    )
    loss, _ = worker.policy_loss(rows, mini_batch)
    log_prob_BR, *_ = map(rows.of_rows, worker.score_tokens(rows, with_entropy=False))
    by_row = [log_prob_BR[row].sum() * rows["advantages"][row].sum() for row in range(8)]
    assert loss.item() == pytest.approx(
        -sum(by_row).item() / 8, rel=1e-6
    ) and log_prob_BR.shape == (8, RESPONSE)


@pytest.mark.parametrize(
    ("base", "name", "message"),
    [
        (
            ActorWorker,
            "_score",
            "has its own _score, which nothing calls any more: override score_tokens, which ret",
        ),
        (ReferenceWorker, "_score", "has its own _score, .*: override score_tokens"),
        (
            CriticWorker,
            "_predict",
            "has its own _predict, .*: override values_of_tokens, which returns",
        ),
        (
            RewardModelWorker,
            "_score",
            "has a method _score, .*: override score_rows, which returns the score of each",
        ),
    ],
)
def test_a_subclass_with_a_pass_of_earlier_versions_is_refused_by_what_to_override(
    base, name, message
):
    with pytest.raises(ValueError, match=message):
        type("Old", (base,), {name: lambda self, micro: None})


def test_what_unpacked_to_padded_rows_says_what_does_now(model_path):
    rows = Rows.of(make_batch())
    packed = actor_group(model_path).workers[0].engine.pack(rows)
    message = (
        r"packed.of_tokens\(values\) has one number for each response token, and micro.of_rows"
    )
    with pytest.raises(ValueError, match=message):
        packed.unpack(torch.zeros(len(packed.scored)))


@pytest.mark.parametrize("rows_of_sample", [1, 2])
def test_a_column_that_an_objective_writes_into_is_what_its_samples_have(rows_of_sample):
    data = make_batch()
    data.batch["sample_id"] = torch.arange(8) // rows_of_sample
    micro = MicroBatch(Rows.of(data), "cpu")
    before = micro.by_sample()["advantages"].clone()
    micro["advantages"].mul_(8)
    assert torch.equal(micro.by_sample()["advantages"], 8 * before)
    micro["advantages"] = micro["advantages"] / 4
    assert torch.equal(micro.by_sample()["advantages"], 2 * before)
    message = r"micro\['log_prob'\] is given the shape .* and has 8 rows: pad .* by micro.of_rows"
    with pytest.raises(ValueError, match=message):
        micro["log_prob"] = torch.zeros(len(micro.in_rows.of_values))


def test_no_micro_batch_has_more_tokens_than_its_budget(model_path):
    data = make_batch()
    group = actor_group(model_path, budget=14)
    pack, tokens = group.workers[0].engine.pack, []
    group.workers[0].engine.pack = lambda rows: (
        tokens.append(int(rows.lengths_B.sum())) or pack(rows)
    )
    update(group, data)
    assert sum(tokens) == padded(data).batch["attention_mask"].sum() and 11 < max(tokens) <= 14


def test_padding_rows_change_neither_gradient_nor_metrics(model_path):
    data = make_batch(rows=6)
    filler = make_batch(rows=2, seed=7)
    filled = DataProto.concat([data, filler])
    filled.batch["is_pad"] = torch.tensor([False] * 6 + [True] * 2)
    results = []
    for batch, micro in ((data, 6), (filled, 2)):
        group = actor_group(model_path, micro=micro)
        results.append(
            gradients_of(group.workers[0], lambda group=group, batch=batch: update(group, batch))
        )
    (gradients, metrics), (filled_gradients, filled_metrics) = results
    assert relative_error(filled_gradients, gradients) < 2e-6
    assert filled_metrics["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-5)
    assert filled_metrics["actor/ppo_kl"] == pytest.approx(metrics["actor/ppo_kl"], rel=1e-5)


@pytest.mark.parametrize("passes", [{"micro": 2}, {"budget": 14}])
def test_a_batch_without_rows_has_scores_of_no_row_and_takes_no_step(model_path, passes):
    data = make_batch(rows=4)[[]]
    group = actor_group(model_path, **passes)
    before = parameters_of(group.workers[0])
    scores = padded_output(data, group.compute_log_prob(data).get())
    assert {name: (tuple(score.shape), score.dtype) for name, score in scores.items()} == {
        "old_log_probs": ((0, RESPONSE), torch.float32),
        "entropys": ((0, RESPONSE), torch.float32),
    }
    update(group, data)
    data.batch["mini_batch"] = torch.zeros(0, dtype=torch.int64)
    update(group, data)
    assert all(
        torch.equal(value, before[name]) for name, value in parameters_of(group.workers[0]).items()
    )


def test_a_batch_without_any_response_token_takes_no_step(model_path):
    data = make_batch(rows=4)
    data.batch["response_mask"] = torch.zeros_like(data.batch["response_mask"])
    group = actor_group(model_path)
    before = parameters_of(group.workers[0])
    update(group, data)
    assert all(
        torch.equal(value, before[name]) for name, value in parameters_of(group.workers[0]).items()
    )


@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_loss_of_a_training_step_is_the_mean_over_the_mini_batches_with_tokens(
    model_path, num_parts
):
    data, optim = make_batch(rows=16), {"lr": 1e-30}  # which moves no weight
    mask, starts = jagged_parts(data.batch["response_mask"])
    mask[starts[12] :] = 0
    group = actor_group(model_path, prompts=4, micro=2, ppo_epochs=2, optim=optim)
    parts = data.chunk(num_parts)
    for number, part in enumerate(parts, start=1):
        part.meta_info["part_of_step"] = (number, num_parts)
    metrics = merge_metrics([group.update_actor(part).get().meta_info["metrics"] for part in parts])
    alone = [
        update(actor_group(model_path, prompts=4, optim=optim), data[i : i + 4]) for i in (0, 4, 8)
    ]
    for name in ("actor/loss", "actor/pg_loss"):
        assert metrics[name].value == pytest.approx(sum(each[name] for each in alone) / 3, rel=1e-5)


def test_epochs_and_mini_batches_each_take_a_step(model_path):
    group = actor_group(model_path, prompts=2, ppo_epochs=3)
    worker, steps = group.workers[0], []
    take_step = worker.engine.step
    worker.engine.step = lambda: steps.append(take_step()) or steps[-1]
    update(group, make_batch(rows=8))
    assert len(steps) == 3 * 4


def test_gradients_are_clipped_to_the_configured_norm(model_path):
    data = make_batch()
    free = gradients_of((group := actor_group(model_path)).workers[0], lambda: update(group, data))[
        0
    ]
    group = actor_group(model_path, grad_clip=0.01)
    clipped, metrics = gradients_of(
        group.workers[0], lambda: update(group, data), after_clipping=True
    )
    assert math.sqrt(sum(g.square().sum().item() for g in clipped.values())) == pytest.approx(
        0.01, rel=1e-5
    )
    assert metrics["actor/grad_norm"] == pytest.approx(
        math.sqrt(sum(g.square().sum().item() for g in free.values()))
    )


def test_tied_weights_stay_tied_and_get_both_gradients(tmp_path):
    path = write_model(tmp_path / "tied", tie=True)
    data = make_batch()
    group = actor_group(path)
    gradients, _ = gradients_of(group.workers[0], lambda: update(group, data))
    hf = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    reference_policy_loss(hf, data).backward()
    assert "lm_head.weight" not in gradients
    assert (
        relative_error(gradients, {name: p.grad.float() for name, p in hf.named_parameters()})
        < 1e-5
    )


def test_a_non_finite_gradient_skips_the_step_and_is_counted(model_path):
    data = make_batch()
    broken = make_batch()
    broken.batch["advantages"][0, 0] = float("inf")
    group = actor_group(model_path)
    before = parameters_of(group.workers[0])
    metrics = update(group, broken)
    assert metrics["actor/skipped_steps"] == 1
    assert all(
        torch.equal(value, before[name]) for name, value in parameters_of(group.workers[0]).items()
    )
    assert update(group, data)["actor/skipped_steps"] == 0
    for _ in range(3):
        update(group, broken)
    with pytest.raises(WorkerError, match="4 optimizer steps in a row"):
        update(group, broken)


def test_steps_that_were_skipped_before_a_resume_count_after_it(model_path, tmp_path):
    broken = make_batch()
    broken.batch["advantages"][0, 0] = float("inf")
    group, resumed = actor_group(model_path), actor_group(model_path)
    for _ in range(2):
        update(group, broken)
    group.save_checkpoint(str(tmp_path / "checkpoint"))
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    update(resumed, broken)
    with pytest.raises(WorkerError, match="4 optimizer steps in a row"):
        update(resumed, broken)


def test_offloading_changes_no_number(model_path):
    data, results = make_batch(), []
    for offload in (False, True):
        group = actor_group(
            model_path, fsdp={"param_offload": offload, "optimizer_offload": offload}
        )
        update(group, data)
        update(group, data)
        results.append(parameters_of(group.workers[0]))
    assert all(torch.equal(value, results[0][name]) for name, value in results[1].items())


def test_parameters_that_stay_gathered_are_never_stale(model_path, tmp_path):
    data, settings = make_batch(), {"fsdp": {"strategy": "zero1"}, "micro": 3}
    group, reference = actor_group(model_path, **settings), actor_group(model_path)
    path = str(tmp_path / "checkpoint")
    group.save_checkpoint(path)
    before = group.compute_log_prob(data).get().batch["old_log_probs"].values()
    gradients, _ = gradients_of(group.workers[0], lambda: update(group, data))
    expected, _ = gradients_of(reference.workers[0], lambda: update(reference, data))
    assert relative_error(gradients, expected) < 2e-6
    assert not torch.equal(
        group.compute_log_prob(data).get().batch["old_log_probs"].values(), before
    )
    group.load_checkpoint(path)
    assert torch.equal(group.compute_log_prob(data).get().batch["old_log_probs"].values(), before)


def test_gradient_checkpointing_changes_no_number(model_path):
    data, results = make_batch(), []
    for enable in (True, False):
        config = policy_config(model_path)
        model = config.model.model_copy(update={"enable_gradient_checkpointing": enable})
        config = config.model_copy(update={"model": model})
        group = local_group(ActorWorker, config)
        results.append(gradients_of(group.workers[0], lambda group=group: update(group, data))[0])
    assert relative_error(results[1], results[0]) < 1e-6


def test_bfloat16_layers_train_float32_weights(model_path):
    group = actor_group(model_path, fsdp={"dtype": "bfloat16"})
    metrics = update(group, make_batch())
    assert all(value.dtype == torch.float32 for value in parameters_of(group.workers[0]).values())
    reference = update(actor_group(model_path), make_batch())
    assert metrics["actor/grad_norm"] == pytest.approx(reference["actor/grad_norm"], rel=0.1)
    assert metrics["actor/grad_norm"] != reference["actor/grad_norm"]


def test_log_probs_of_a_fresh_actor_and_the_reference_are_the_same(model_path):
    data = make_batch()
    reference = local_group(ReferenceWorker, policy_config(model_path))
    actor = actor_group(model_path, micro=3)
    output, of_reference = (
        actor.compute_log_prob(data).get(),
        reference.compute_ref_log_prob(data).get(),
    )
    scores, columns = padded_output(data, output), padded(data).batch
    ref_log_prob = padded_output(data, of_reference)["ref_log_prob"]
    torch.testing.assert_close(scores["old_log_probs"], ref_log_prob, rtol=0, atol=1e-5)
    mask = columns["response_mask"].bool()
    entropy = metric_values(output.meta_info["metrics"])["actor/entropy"]
    assert entropy == pytest.approx(scores["entropys"][mask].mean().item(), rel=1e-5)
    # A ratio of 1 everywhere: the loss is minus the mean advantage, nothing is clipped, the KL is
    # 0.
    data.batch["old_log_probs"] = of_reference.batch["ref_log_prob"]
    metrics = update(actor, data)
    assert metrics["actor/pg_loss"] == pytest.approx(
        -columns["advantages"][mask].mean().item(), rel=1e-4
    )
    assert metrics["actor/pg_clipfrac"] == 0 and metrics["actor/ppo_kl"] == pytest.approx(
        0, abs=1e-6
    )


def test_an_update_of_one_step_finds_the_old_log_probs_itself(model_path):
    data = make_batch()
    group = actor_group(model_path, micro=3)
    output = group.compute_log_prob(data).get()
    computed = output.batch["old_log_probs"]
    data.batch["old_log_probs"] = computed
    gradients, metrics = gradients_of(group.workers[0], lambda: update(group, data))
    without = data.select(batch_keys=sorted(set(data.batch.keys()) - {"old_log_probs"}))
    without.batch["rollout_log_probs"] = computed + 0.1
    group = actor_group(model_path, micro=3)
    gradients_without, metrics_without = gradients_of(
        group.workers[0], lambda: update(group, without)
    )
    assert relative_error(gradients_without, gradients) < 1e-6
    assert metrics_without["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-5)
    # What `compute_log_prob` and the driver would have told about the batch.
    entropy = metric_values(output.meta_info["metrics"])["actor/entropy"]
    assert metrics_without["actor/entropy"] == pytest.approx(entropy, rel=1e-5)
    difference = computed.values().exp() * (math.exp(0.1) - 1)
    assert metrics_without["training/rollout_probs_diff_mean"] == pytest.approx(
        difference.mean().item(), rel=1e-4
    )
    assert metrics_without["training/rollout_probs_diff_max"] == pytest.approx(
        difference.max().item(), rel=1e-4
    )


@pytest.mark.parametrize("schedule", [{"ppo_epochs": 2}, {"prompts": 4}])
def test_an_update_of_several_steps_needs_old_log_probs(model_path, schedule):
    data = make_batch()
    without = data.select(batch_keys=sorted(set(data.batch.keys()) - {"old_log_probs"}))
    with pytest.raises(
        ValueError,
        match=r"no old_log_probs for 2 optimizer steps \(. epoch\(s\) in mini-batches of [48] "
        r"responses\)",
    ):
        actor_group(model_path, **schedule).workers[0].update_actor(without)


def test_the_learning_rate_follows_the_updates(model_path):
    group = actor_group(model_path, optim={"lr": 1.0, "lr_warmup_steps": 4})
    data = make_batch()
    assert [update(group, data)["actor/lr"] for _ in range(2)] == [0.25, 0.5]


def test_the_exported_policy_reloads_with_the_same_logits(model_path, tmp_path):
    group = actor_group(model_path)
    data = make_batch()
    update(group, data)
    target = tmp_path / "global_step_1" / "huggingface"
    group.save_hf(str(target))
    log_probs_BR = padded_output(data, group.compute_log_prob(data).get())["old_log_probs"]
    hf = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
    assert hf.dtype == torch.float32
    tokens, count = (
        torch.cat([data.batch["prompts"][0], data.batch["responses"][0]]),
        len(data.batch["responses"][0]),
    )
    expected = torch.log_softmax(hf(tokens[None]).logits[0, -count - 1 : -1] / 0.7, -1).gather(
        -1, tokens[-count:, None]
    )
    torch.testing.assert_close(log_probs_BR[0, :count], expected[:, 0], rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(target).eos_token == "<eos>"
    exported, trained = load_file(target / "model.safetensors"), parameters_of(group.workers[0])
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


def test_the_exported_critic_reloads_with_its_head(model_path, tmp_path):
    group = critic_group(model_path)
    update(group, make_batch())
    group.save_hf(str(tmp_path / "critic"))
    hf = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(hf.score.weight, parameters_of(group.workers[0])["score.weight"])


@pytest.mark.parametrize(("offloaded", "offloads"), [(False, False), (False, True), (True, False)])
def test_training_goes_on_bit_for_bit_after_a_checkpoint(
    model_path, tmp_path, offloaded: bool, offloads: bool
):
    data, path = make_batch(), str(tmp_path / "checkpoint")
    settings = {"optim": {"lr": 1e-2, "lr_scheduler_type": "linear"}}
    straight, resumed = (
        local_group(
            ActorWorker,
            policy_config(
                model_path,
                **settings,
                fsdp={"param_offload": offload, "optimizer_offload": offload},
            ),
            total_training_steps=5,
        )
        for offload in (offloaded, offloads)
    )
    update(straight, data)
    straight.save_checkpoint(path)
    resumed.load_checkpoint(path)
    assert update(straight, data)["actor/lr"] == update(resumed, data)["actor/lr"] == 8e-3
    expected = parameters_of(straight.workers[0])
    assert all(
        torch.equal(value, expected[name])
        for name, value in parameters_of(resumed.workers[0]).items()
    )


def test_a_checkpoint_before_the_first_step_changes_nothing_that_follows(model_path, tmp_path):
    data, path = make_batch(), str(tmp_path / "checkpoint")
    settings = {"optim": {"lr": 1e-2, "weight_decay": 0.3}}
    straight, saved, resumed = (actor_group(model_path, **settings) for _ in range(3))
    saved.save_checkpoint(path)
    resumed.load_checkpoint(path)
    engine = resumed.workers[0].engine
    assert {state["step"].item() for state in engine.optimizer.state.values()} == {0}
    for group in (straight, saved, resumed):
        update(group, data)
        update(group, data)
    expected = parameters_of(straight.workers[0])
    for group in (saved, resumed):
        assert all(
            torch.equal(value, expected[name])
            for name, value in parameters_of(group.workers[0]).items()
        )
    assert {state["step"].item() for state in engine.optimizer.state.values()} == {2}


def test_loading_a_checkpoint_that_is_not_there_is_an_error(model_path, tmp_path):
    with pytest.raises(WorkerError, match="There is no checkpoint"):
        actor_group(model_path).load_checkpoint(str(tmp_path / "nothing"))


def test_exported_weights_hold_every_parameter_once(model_path):
    group = actor_group(model_path)
    (export,) = group.export_weights(version=4).get()
    assert export.version == 4 and export.num_tensors == len(parameters_of(group.workers[0]))


def test_the_reward_models_score_lies_on_the_last_response_token(tmp_path):
    group = local_group(
        RewardModelWorker,
        reward_config(write_reward_model(tmp_path / "reward"), micro_batch_size_per_gpu=3),
    )
    data = make_batch()
    scores_BR = padded_output(data, group.compute_rm_score(data).get())["rm_scores"]
    last_B = padded(data).batch["response_mask"].sum(-1) - 1
    assert torch.equal(scores_BR.nonzero()[:, 1], last_B)


class HalvedLossActor(ActorWorker):
    """A user's subclass that changes the objective."""

    def policy_loss(self, micro, mini_batch):
        loss, metrics = super().policy_loss(micro, mini_batch)
        return 0.5 * loss, metrics


def test_a_subclass_changes_the_objective(model_path):
    data = make_batch()
    whole = update(actor_group(model_path), data)
    half = local_group(HalvedLossActor, policy_config(model_path))
    metrics = metric_values(half.update_actor(data).get().meta_info["metrics"])
    assert metrics["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"] / 2, rel=1e-6)


class CountReads(TorchDispatchMode):
    """Counts the numbers that Python reads out of tensors; on a GPU each would wait for the
    device."""

    reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("rows_of_sample", [1, 2])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_objective_reads_no_number_from_the_device(
    model_path, role, rows_of_sample, monkeypatch
):
    data = make_batch()
    data.batch["sample_id"] = torch.arange(8) // rows_of_sample
    rows = MicroBatch(Rows.of(data), "cpu")
    mini_batch = MiniBatch(
        [], num_tokens=40.0, num_sequences=8.0, share=0.5, response_length=RESPONSE
    )
    if role == "actor":
        worker = actor_group(model_path, entropy_coeff=0.1, use_kl_loss=True).workers[0]
        objective, pass_of_the_model = worker.policy_loss, "score_tokens"
        del rows["old_log_probs"]
        rows["rollout_log_probs"] = rows["ref_log_prob"]
        outputs = worker.score_tokens(rows, with_entropy=True)
        expected = {
            "actor/pg_loss",
            "actor/entropy_loss",
            "actor/kl_loss",
            "training/rollout_probs_diff_max",
        }
    else:
        worker = critic_group(model_path).workers[0]
        objective, pass_of_the_model = worker.value_loss, "values_of_tokens"
        outputs, expected = worker.values_of_tokens(rows), {"critic/vf_loss", "critic/vpred_mean"}
    monkeypatch.setattr(worker, pass_of_the_model, lambda *_, **__: outputs)
    with CountReads() as count:
        loss, metrics = objective(rows, mini_batch)
        assert count.reads == 0
        loss.item()
        assert count.reads == 1
    assert expected <= set(metrics)


def test_a_loss_gets_the_counts_of_the_mini_batch_beside_the_configuration(model_path, monkeypatch):
    monkeypatch.setattr(POLICY_LOSSES, "entries", dict(POLICY_LOSSES.entries))
    given = []

    @register_policy_loss("with_counts")
    def with_counts(log_prob, response_mask, loss_agg_mode, counts, config):
        given.append((counts, config))
        return agg_loss(log_prob, response_mask, loss_agg_mode, **counts.arguments), {}

    @register_policy_loss("as_for_verl")
    def as_for_verl(log_prob, response_mask, loss_agg_mode, config):
        given.append((None, config))
        return agg_loss(log_prob, response_mask, loss_agg_mode, **config.global_batch_info), {}

    rows = MicroBatch(Rows.of(make_batch()), "cpu")
    mini_batch = MiniBatch(
        [], num_tokens=50.0, num_sequences=8.0, share=1.0, response_length=RESPONSE
    )
    losses = []
    for name in ("with_counts", "as_for_verl"):
        policy_loss = {"loss_mode": name}
        config = policy_config(model_path, policy_loss=policy_loss, clip_ratio_c=4.5)
        worker = local_group(ActorWorker, config).workers[0]
        loss, _ = worker.policy_loss(rows, mini_batch)
        losses.append(loss.item())
        assert given[-1][1].block is worker.config.actor
        assert given[-1][1].clip_ratio_c == 4.5
    (counts, config), (_, of_verl) = given
    assert counts == BatchCounts(50.0, 8.0, RESPONSE, dp_size=1)
    assert config.global_batch_info == of_verl.global_batch_info == counts.arguments
    log_prob_BR, *_ = map(rows.of_rows, worker.score_tokens(rows, with_entropy=False))
    total = (log_prob_BR * rows["response_mask"]).sum().item()
    assert losses[0] == pytest.approx(total / 50, rel=1e-5)
    assert losses[0] == losses[1]


SEQUENCE = ("prompts", "responses", "response_mask")


@pytest.mark.parametrize(
    ("role", "method", "reads", "writes"),
    [
        (
            ActorWorker,
            "compute_log_prob",
            (*SEQUENCE, "routed_experts?"),
            (
                *("old_log_probs", "entropys", "sum_pi_squared?", "routed_experts?"),
                "unreplayed_log_probs?",
            ),
        ),
        (ReferenceWorker, "compute_ref_log_prob", SEQUENCE, ("ref_log_prob",)),
        (
            ReplayingReferenceWorker,
            "compute_ref_log_prob",
            (*SEQUENCE, "routed_experts"),
            ("ref_log_prob",),
        ),
        (CriticWorker, "compute_values", SEQUENCE, ("values",)),
        (
            CriticWorker,
            "update_critic",
            (*SEQUENCE, "values", "returns", "sample_id?", "mini_batch?"),
            None,
        ),
    ],
)
def test_a_method_declares_the_columns_that_it_is_sent_and_those_that_it_returns(
    role, method, reads, writes
):
    spec = registered_methods(role)[method]
    assert (spec.reads, spec.writes) == (reads, writes)
