"""The trainer's weights on their way to the rollout engines, and the proof that they arrived."""

from verl_like.workers.weights.arrival import StaleWeightsError, WeightSyncError
from verl_like.workers.weights.exports import collect_weights
from verl_like.workers.weights.gloo import GlooTransport
from verl_like.workers.weights.ipc import IpcTransport
from verl_like.workers.weights.nccl import NcclTransport
from verl_like.workers.weights.object_store import ObjectStoreTransport
from verl_like.workers.weights.shared_memory import SharedMemoryTransport
from verl_like.workers.weights.transport import WeightTransport

WEIGHT_TRANSPORTS: dict[str, type[WeightTransport]] = {
    "object_store": ObjectStoreTransport,
    "shared_memory": SharedMemoryTransport,
    "gloo": GlooTransport,
    "nccl": NcclTransport,
    "ipc": IpcTransport,
}
"""The transports by their names in `rollout.weight_transport`; every process makes its own one."""
