"""What the workers around a trained model have in common: checkpoints and export."""

import torch

from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.worker import Worker
from verl_like.workers.config import TrainedModelConfig
from verl_like.workers.engine.fsdp import TrainingEngine
from verl_like.workers.engine.sequence_parallel import data_parallel_size
from verl_like.workers.models.pretrained import save_pretrained


class TrainedWorker(Worker):
    """One rank of a trained model; `init_model` of a subclass sets `engine`."""

    engine: TrainingEngine
    model_config: TrainedModelConfig

    def register_mesh(self, mesh_name: str, sequence_parallel_size: int) -> int:
        """Names the shard of a batch that this rank works on; returns the number of shards.

        `sequence_parallel_size` neighbouring ranks share one, and the first of them gives the result.
        """
        shards = data_parallel_size(self.world_size, sequence_parallel_size)
        shard, rank_in_shard = divmod(self.rank, sequence_parallel_size)
        self._register_dispatch_collect_info(mesh_name, shard, rank_in_shard == 0)
        return shards

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Writes parameters, optimizer state and step count to the folder `path`, which all ranks see."""
        self.engine.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Reads what `save_checkpoint` wrote, on any number of ranks.

        Raises:
            ValueError: there is no checkpoint at `path`.
        """
        with self.engine.on_device():  # the optimizer's state is loaded to where the parameters are
            self.engine.load(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        """Writes the model as a Hugging Face folder, in the dtype the layers compute in; rank 0 writes."""
        dtype = getattr(torch, self.engine.fsdp.dtype)
        kept = {}
        # Gathering is collective: every rank takes part, one parameter at a time, and rank 0 keeps them. It happens in
        # host memory, for an inference engine may have its share of the device.
        for name, parameter in self.engine.named_parameters():
            gathered = parameter.detach().to("cpu", dtype).full_tensor()
            if self.rank == 0:
                kept[name] = gathered
        if self.rank == 0:
            save_pretrained(self.engine.model.hf, kept, self.model_config, dtype, path)
