"""What distributing the experts of a model over ranks demands, for all trainers."""

from collections.abc import Iterator

from verl_like.workers.config.engine import TrainedFsdpConfig
from verl_like.workers.config.models import TrainedModelConfig


def distributed_experts(
    fsdp: TrainedFsdpConfig,
    model: TrainedModelConfig,
    num_processes: int,
    *,
    key: str,
    model_key: str,
) -> Iterator[str]:
    """Yields what is wrong with the `expert_parallel_size` of a model on so many processes."""
    size = fsdp.expert_parallel_size
    if size == 1:
        return
    num_shards = num_processes if fsdp.num_shards == -1 else fsdp.num_shards
    if num_shards % size:
        yield (
            f"{key}.expert_parallel_size={size} does not divide the {num_shards} processes that "
            "share the parameters; set it to a divisor of that"
        )
    if model.use_torch_compile:
        yield (
            f"{key}.expert_parallel_size={size} with {model_key}.use_torch_compile=true: how many "
            "tokens travel is known only when a layer runs, and that cannot be compiled; set one "
            "of them to its default"
        )
