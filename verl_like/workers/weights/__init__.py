"""Ways of the weights from the trainer to the engines."""

from verl_like.workers.weights.direct import IpcTransport, NcclTransport
from verl_like.workers.weights.gloo import GlooTransport
from verl_like.workers.weights.shared_memory import SharedMemoryTransport
from verl_like.workers.weights.transport import WeightTransport

WEIGHT_TRANSPORTS = {
    "object_store": WeightTransport,
    "shared_memory": SharedMemoryTransport,
    "gloo": GlooTransport,
}
"""By `rollout.weight_transport`; each end makes one of its own."""
WEIGHT_TRANSPORTS |= {"nccl": NcclTransport, "ipc": IpcTransport}
