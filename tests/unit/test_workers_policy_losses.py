"""Every policy loss through the actor's own update: the same for any micro-batches, with what the driver adds."""

import pytest
import torch
from tiny_worker_models import RESPONSE, local_group, make_batch, parameters_of, policy_config, write_model

from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.protocol import metric_values
from verl_like.workers.actor import ActorWorker


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("policy"))


def updated(model_path, loss, **layout):
    """Metrics and parameters after one update of two mini-batches, with weights, selected tokens and a teacher."""
    options = {"loss_mode": loss} | ({"dro_beta": 0.3} if loss == "dro" else {})
    config = policy_config(model_path, prompts=4, policy_loss=options, loss_agg_mode="seq-mean-token-mean", **layout)
    actor, data = local_group(ActorWorker, config), make_batch()
    generator = torch.Generator().manual_seed(2)
    shape = (len(data), RESPONSE)
    data.batch["old_log_probs"] = actor.compute_log_prob(data).get().batch["old_log_probs"]
    data.batch["old_log_probs"] += 0.3 * torch.randn(shape, generator=generator)
    data.batch["rollout_is_weights"] = 2 * torch.rand(shape, generator=generator)
    data.batch["selected_tokens"] = torch.rand(shape, generator=generator) < 0.5
    data.batch["teacher_log_prob"] = -4 + torch.randn(shape, generator=generator)
    metrics = metric_values(actor.update_actor(data).get().meta_info["metrics"])
    return {name: value for name, value in metrics.items() if "perf/" not in name}, parameters_of(actor.workers[0])


@pytest.mark.parametrize("loss", POLICY_LOSSES.file_names())
def test_an_update_is_the_same_for_any_micro_batches(loss, model_path):
    metrics, parameters = updated(model_path, loss, micro=4)
    assert metrics["actor/grad_norm"] > 0
    for layout in ({"micro": 1}, {"budget": 25}):
        other_metrics, other_parameters = updated(model_path, loss, **layout)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(other_parameters[name], value, rtol=0, atol=1e-4)
