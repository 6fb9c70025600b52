"""Copies of the trained actor and critic, which only run forward, with weights from the trainer."""

from itertools import chain
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.workers.actor import ScoringWorker
from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.critic import ValueWorker
from verl_like.workers.model_worker import ModelWorker
from verl_like.workers.weights.arrival import check_arrival, check_staged
from verl_like.workers.weights.exports import WeightExport, iterate_weights
from verl_like.workers.weights.file_layout import FileTensor, each_in_files
from verl_like.workers.weights.fingerprints import (
    local_fingerprint,
    read_fingerprints,
    sum_over_ranks,
)
from verl_like.workers.weights.transport import WeightTransport


class CopyWorker(ModelWorker):
    """One rank of a copy of a trained model. It starts with the weights that the trained model
    starts with."""

    model_config: TrainedModelConfig
    version: int | None = 0
    """The version of its weights, or None after a load that failed."""
    weight_transport: WeightTransport

    def start_copy(self, mesh_name: str, sequence_parallel_size: int) -> None:
        """Makes the engine.

        The model is sharded over all ranks of the copy, in the dtype that its layers compute in.
        """
        trained = self.fsdp_config
        self.model_config = self.model_config.with_scaled_adapter()
        self.fsdp_config = ForwardFsdpConfig(
            param_offload=trained.param_offload, dtype=trained.dtype
        )
        self.register_mesh(mesh_name, sequence_parallel_size)
        self.start_engine(sequence_parallel_size)

    def infer(self, *args: Any, **kwargs: Any) -> DataProto:
        """Calls `ModelWorker.infer`. Raises RuntimeError if the last load failed."""
        if self.version is None:
            raise RuntimeError(
                f"{type(self).__name__} has no verified weights; call load_weights before "
                "computing."
            )
        return super().infer(*args, **kwargs)

    def weights_in_files(self) -> dict[str, tuple[FileTensor, Tensor]]:
        """Returns the tensors of files that the trained model sends, by their names, each with the
        weight that holds it: parameters, then buffers.

        Parameters are DTensors with this rank's shards.
        """
        weights = chain(self.engine.named_parameters(), self.engine.named_buffers())
        in_files = each_in_files(self.engine.file_layout, weights)
        return {file.name: (file, weight) for file, weight in in_files}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, exported: list[WeightExport], version: int) -> str:
        """Loads what all ranks of the trained model exported into this rank's shard, and verifies
        it.

        Parameters are written in place, in host memory if they are offloaded; a buffer gets the
        dtype of the trained model's. Returns one fingerprint of all weights together, see
        `check_arrival`.

        Raises WeightSyncError if the exports are incomplete, corrupt or of another model; the copy
        then keeps the weights it has. It also raises WeightSyncError if the loaded weights are not
        the trained model's; the copy then refuses to compute until a later load succeeds.
        """
        what = f"Weights of version {version}"
        received = self.weight_transport.receive(exported, self)
        expected = check_staged(received, version, self.device)
        weights = self.weights_in_files()
        shapes = {name: file.shape for name, (file, _weight) in weights.items()}
        sent_shapes = {name: tensor.shape for name, tensor in iterate_weights(received)}
        other_model = f"{what} are not of the model {self.model_config.path}"
        check_arrival(sent_shapes, shapes, other_model)
        self.version = None
        buffers = {id(buffer) for _name, buffer in self.engine.named_buffers()}
        for name, tensor in iterate_weights(received):
            file, weight = weights[name]
            is_buffer = id(weight) in buffers
            if is_buffer:
                weight.data = tensor.to(weight.device, copy=True)
            else:
                _write(file, weight, tensor)
        sums: dict[str, Tensor | int] = {}
        for name, (file, weight) in self.weights_in_files().items():  # what the engine has now
            turn = len(sums) % self.world_size
            sums[name] = local_fingerprint(file, weight, self.rank, turn)
        own_fingerprints = read_fingerprints(sums)
        loaded = sum_over_ranks(own_fingerprints)
        fingerprint = check_arrival(expected, loaded, f"{what} did not arrive at the copy")
        self.version = version
        return fingerprint


def _write(file: FileTensor, weight: Tensor, tensor: Tensor) -> None:
    """Writes this rank's part of a tensor of files into a sharded parameter."""
    assert isinstance(weight, DTensor), (
        "a pass that failed left whole parameters, which the next one drops"
    )
    mesh = weight.device_mesh
    placements = weight.placements
    own = weight.to_local()
    if file.is_whole:
        part = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        own.copy_(part.to_local())
        return
    _shape, offsets = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    part_of_file = file.of_rows(own, offsets[0])
    if part_of_file is None:
        return
    values = part_of_file.values
    start = part_of_file.first_row
    end = start + len(values)
    values.copy_(tensor[start:end])


class ActorCopyWorker(ScoringWorker, CopyWorker):
    """One rank of a copy of the actor, which computes old log-probabilities while another process
    trains."""

    def init_model(self) -> None:
        """Loads the model.

        The actor exports weights in `rollout.dtype`. A rule of the configuration checks that the
        dtype of the copy can hold their values.
        """
        self.start_copy("actor", self.config.actor.ulysses_sequence_parallel_size)


class CriticCopyWorker(ValueWorker, CopyWorker):
    """One rank of a copy of the critic, which computes values while another process trains."""

    def init_model(self) -> None:
        """Loads the model.

        If the checkpoint lacks a value head, it gets the same head as the trained critic, by the
        same seed.
        """
        self.start_copy("critic", self.config.ulysses_sequence_parallel_size)
