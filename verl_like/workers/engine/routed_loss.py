"""The loss of a mixture of experts: beside it the load of the experts is recorded, and balanced."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.protocol import Metric
from verl_like.protocol.row_ops import jagged_parts
from verl_like.workers.engine.base import TrainingEngine
from verl_like.workers.engine.micro_batch import MicroBatch
from verl_like.workers.engine.mini_batches import DeviceMetric, MicroLoss, MicroMetrics, MiniBatch
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.routed_experts import OWN, ROUTED_EXPERTS, RouterShape
from verl_like.workers.models.router_load import LOAD_COUNT, RouterLoad

# Legend: L layers with a router, E experts, k selected experts.


@dataclass(frozen=True)
class _Balance:
    """The shares of tokens by which the routers of one optimizer step are balanced."""

    shares_E: Tensor
    """f, the tokens of each expert over all tokens, in all layers. Their sum is k."""
    num_routings: Tensor
    """The number of tokens times L."""

    def loss(self, probabilities_LE: Tensor) -> Tensor:
        """Returns E sum_e f_e P_e, where P sums over the tokens of a micro-batch alone."""
        sums_E = probabilities_LE.sum(0)
        means_E = sums_E / self.num_routings
        products_E = self.shares_E * means_E
        return len(products_E) * products_E.sum()


class RoutedLoss:
    """A loss of micro-batches of one update, which records the load of the experts.

    With a coefficient it adds coefficient * E sum_e f_e P_e for each optimizer step. That is the
    loss of Switch Transformers (arXiv:2101.03961, eq. 4 to 6) in the form of transformers'
    `load_balancing_loss_func`, in which the tokens of all layers count as one set. f_e is the share
    of tokens that expert e computes, and P_e the mean of the router's probability of it, which
    alone is differentiated. Both are over the whole mini-batch and all ranks.

    With router replay, f and P are over the tokens that have a record. Otherwise f is counted by a
    first pass without gradients, unless each rank has one micro-batch.
    """

    def __init__(
        self,
        loss: MicroLoss,
        rows: Rows,
        engine: TrainingEngine,
        shape: RouterShape,
        *,
        prefix: str,
        coefficient: float,
    ) -> None:
        self.loss = loss
        self.rows = rows
        self.engine = engine
        self.shape = shape
        self.prefix = prefix
        self.coefficient = coefficient
        self.num_left = 0
        """The micro-batches that are left of the present optimizer step."""
        self.balance: _Balance | None = None
        size = (shape.num_layers, shape.num_experts)
        self.counts = torch.zeros(size, dtype=torch.int64, device=engine.device)
        """How many tokens each expert has computed in the update on this rank, (L, E)."""

    def __call__(self, micro: MicroBatch, mini_batch: MiniBatch) -> tuple[Tensor, MicroMetrics]:
        """Returns what a micro-batch adds to the loss of its mini-batch, and metrics."""
        if self.num_left == 0:
            self._begin(mini_batch)
        self.num_left -= 1
        load, loss, metrics = self._run(micro, mini_batch)
        assert load.counts is not None
        self.counts += load.counts
        if not self.coefficient:
            return loss, metrics
        assert load.probabilities is not None
        if self.balance is None:
            self.balance = self._balance_of(load.counts)
        aux_loss = self.balance.loss(load.probabilities)
        metrics[f"{self.prefix}/router_aux_loss"] = DeviceMetric.loss(aux_loss, mini_batch)
        return loss + self.coefficient * aux_loss, metrics

    def metrics(self) -> dict[str, Metric]:
        """Returns the counts of the whole update, over all ranks, as metrics of the first rank.

        All ranks must call it.
        """
        metrics: dict[str, Metric] = {}
        counts = self._over_ranks(self.counts).tolist()
        if dist.get_rank() != 0:
            return metrics
        for layer, of_layer in enumerate(counts):
            for expert, count in enumerate(of_layer):
                name = f"{LOAD_COUNT}{layer}/{expert}"
                metrics[name] = Metric.sum(count)
        return metrics

    def _begin(self, mini_batch: MiniBatch) -> None:
        """Counts the shares of the next optimizer step, if they are not those of one pass."""
        self.num_left = len(mini_batch.micro_batches)
        self.balance = None
        if not self.coefficient:
            return
        if ROUTED_EXPERTS in self.rows:
            counts = self._recorded(mini_batch)
            self.balance = self._balance_of(counts)
        elif self.num_left > 1:
            counts = self._first_pass(mini_batch)
            self.balance = self._balance_of(counts)

    def _run(
        self, micro: MicroBatch, mini_batch: MiniBatch
    ) -> tuple[RouterLoad, Tensor, MicroMetrics]:
        """Returns the load, the loss and the metrics of a micro-batch.

        Raises ValueError if the model has run on other rows.
        """
        load = RouterLoad(with_probabilities=self.coefficient > 0)
        micro.on_host = replace(micro.on_host, load=load)
        loss, metrics = self.loss(micro, mini_batch)
        if load.counts is None:
            raise ValueError(
                "the loss has not run the model on the rows of its micro-batch, so the load of the "
                "experts is not known: pack micro.on_host by engine.pack, and run the result"
            )
        return load, loss, metrics

    @torch.no_grad()
    def _first_pass(self, mini_batch: MiniBatch) -> Tensor:
        """Returns the counts of this rank's micro-batches, (L, E)."""
        total = torch.zeros_like(self.counts)
        for at in mini_batch.micro_batches:
            rows = self.rows.take(at)
            micro = MicroBatch(rows, self.engine.device)
            load, _loss, _metrics = self._run(micro, mini_batch)
            assert load.counts is not None
            total += load.counts
        return total

    def _recorded(self, mini_batch: MiniBatch) -> Tensor:
        """Returns the counts of the routing that this rank's micro-batches replay, (L, E)."""
        at = torch.cat(mini_batch.micro_batches)
        is_scored = self.rows.num_scored_B[at] > 0
        scored = self.rows.take_some(at[is_scored])
        ids, _offsets = jagged_parts(scored[ROUTED_EXPERTS])
        has_record = ids[:, 0, 0] != OWN
        recorded = ids[has_record]
        num_experts = self.shape.num_experts
        of_layers = []
        for of_layer in recorded.unbind(1):
            counts = torch.bincount(of_layer.flatten(), minlength=num_experts)
            of_layers.append(counts)
        counts_LE = torch.stack(of_layers)
        return counts_LE.to(self.engine.device)

    def _balance_of(self, counts_LE: Tensor) -> _Balance:
        """Makes the shares of the counts of this rank's part of a whole mini-batch."""
        counts_E = self._over_ranks(counts_LE).sum(0).float()
        total = counts_E.sum()
        num_routings = (total / self.shape.top_k).clamp(min=1)
        return _Balance(counts_E / num_routings, num_routings)

    def _over_ranks(self, counts: Tensor) -> Tensor:
        """Returns the sum of the counts of all ranks. Ranks that share rows have the same."""
        total = counts.clone()
        dist.all_reduce(total)
        return total // self.engine.sequence_parallel_size
