"""Every policy loss through the actor's own update: the same for any micro-batches, packing and
number of ranks.

A pass holds the whole mini-batch, or a single sequence, or, on two ranks, as many as fit a budget
of tokens. The batch is as the driver makes it, after corrections that weight tokens and remove
tokens and responses. The driver has also computed advantages by then, so that estimators see the
whole batch for any number of ranks.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import start_method
from safetensors.torch import load_file, save_file
from tiny_worker_models import (
    RESPONSE,
    gradients_of,
    local_group,
    make_batch,
    policy_config,
    relative_error,
    write_model,
)
from torch.multiprocessing import start_processes

from verl_like.algorithms.aggregation import LOSS_AGG_MODES
from verl_like.algorithms.corrections import RolloutCorrectionConfig
from verl_like.algorithms.corrections.correction import (
    compute_rollout_correction_and_rejection_mask,
)
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.protocol import DataProto, Metric, merge_metrics, metric_values
from verl_like.protocol.padded import padded, without_padding
from verl_like.single_controller.worker import reserve_port
from verl_like.workers.actor import ActorWorker
from verl_like.workers.planning.partition import rank_shares

MODE = "seq-mean-token-mean"  # the only one that every loss is defined for
CASES = [
    *((loss, MODE) for loss in POLICY_LOSSES.file_names()),
    *(("vanilla", m) for m in LOSS_AGG_MODES if m != MODE),
]
OPTIONS = {"dro": {"dro_beta": 0.3}}
ROWS = 16
IN_ONE_PASS, SINGLE_ROWS, BY_TOKENS = {"micro": ROWS}, {"micro": 1}, {"budget": 24}
CORRECTION = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold=1.2,
    rollout_rs="token_k1,seq_max_k2",
    rollout_rs_threshold="0.6_1.6,0.3",
)


def config_of(model: str, loss: str, mode: str, layout: dict):
    """Two mini-batches; the steps are so small that rounding in the first does not show in the
    second."""
    options = {"loss_mode": loss} | OPTIONS.get(loss, {})
    terms = {"entropy_coeff": 0.01, "use_kl_loss": True} if loss == "vanilla" else {}
    return policy_config(
        model,
        prompts=ROWS // 2,
        policy_loss=options,
        loss_agg_mode=mode,
        optim={"lr": 1e-7},
        **terms,
        **layout,
    )


def update(
    worker: ActorWorker, data: DataProto
) -> tuple[dict[str, torch.Tensor], dict[str, Metric]]:
    """Gradients of the second mini-batch, and the metrics of both."""
    gradients, output = gradients_of(worker, lambda: worker.update_actor(data))
    return gradients, {
        name: m for name, m in output.meta_info["metrics"].items() if "perf/" not in name
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and a batch with all that a loss may ask for."""
    folder = tmp_path_factory.mktemp("policy_losses")
    data = make_batch(ROWS)
    generator = torch.Generator().manual_seed(2)

    def draw() -> torch.Tensor:
        return torch.randn(len(data), RESPONSE, generator=generator)

    actor = local_group(ActorWorker, policy_config(write_model(folder / "model")))
    data.pop(batch_keys=["old_log_probs"])
    columns = padded(data.union(actor.compute_log_prob(data).get())).batch
    columns["old_log_probs"] = columns["old_log_probs"] + 0.3 * draw()
    columns["rollout_log_probs"] = columns["old_log_probs"] + 0.4 * draw()
    columns["teacher_log_prob"] = -4 + draw()
    columns["selected_tokens"] = draw() < 0
    sampled = columns["response_mask"]
    columns["rollout_is_weights"], kept, _ = compute_rollout_correction_and_rejection_mask(
        columns["old_log_probs"], columns["rollout_log_probs"], sampled, CORRECTION
    )
    columns["response_mask"] = kept
    lost = sampled.sum(-1) - kept.sum(-1)
    # Of whole responses, and of parts
    assert (kept.sum(-1) == 0).any() and ((lost > 0) & (kept.sum(-1) > 0)).any()
    save_file(dict(columns.items()), folder / "batch")
    return folder


def read_batch(folder: Path) -> DataProto:
    return without_padding(DataProto.from_dict(tensors=load_file(folder / "batch")), pad_token_id=0)


def train_on_rank(rank: int, port: int, path: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }
    torch.set_num_threads(1)
    folder = Path(path)
    ordered = read_batch(folder).select_idxs(
        np.concatenate(rank_shares(ROWS, ROWS // 2, num_ranks=2))
    )
    half = ordered.select_idxs(range(ROWS // 2 * rank, ROWS // 2 * (rank + 1)))
    for loss, mode in CASES:
        worker = ActorWorker(config_of(str(folder / "model"), loss, mode, BY_TOKENS))
        worker.init_model()
        gradients, metrics = update(worker, half)
        save_file(gradients, folder / f"{loss} {mode} gradients {rank}")
        values = {name: (m.value, m.reduction, m.weight) for name, m in metrics.items()}
        (folder / f"{loss} {mode} metrics {rank}").write_text(json.dumps(values))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    """The folder, with what two ranks computed."""
    holder, port = reserve_port()
    with holder:
        start_processes(train_on_rank, (port, str(folder)), nprocs=2, start_method=start_method())
    return folder


@pytest.mark.parametrize(("loss", "mode"), CASES)
def test_an_update_is_the_same_for_any_micro_batches_packing_and_number_of_ranks(
    two_ranks, loss, mode
):
    def on_one_rank(layout: dict) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        worker = local_group(
            ActorWorker, config_of(str(two_ranks / "model"), loss, mode, layout)
        ).workers[0]
        gradients, metrics = update(worker, read_batch(two_ranks))
        return gradients, metric_values(metrics)

    gradients, metrics = on_one_rank(IN_ONE_PASS)
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/pg_loss"] != 0
    parts = [
        json.loads((two_ranks / f"{loss} {mode} metrics {rank}").read_text()) for rank in (0, 1)
    ]
    merged = merge_metrics([{name: Metric(*part[name]) for name in part} for part in parts])
    on_two_ranks = load_file(two_ranks / f"{loss} {mode} gradients 0"), metric_values(merged)
    for other_gradients, other_metrics in (on_one_rank(SINGLE_ROWS), on_two_ranks):
        assert relative_error(other_gradients, gradients) < 1e-5
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
