"""Ways of the weights from the trainer to the engines: `get_weight_transport` finds the one that is configured."""

from verl_like.workers.weight_transfer.direct import IpcTransport, NcclTransport
from verl_like.workers.weight_transfer.gloo import GlooTransport
from verl_like.workers.weight_transfer.shared_memory import SharedMemoryTransport
from verl_like.workers.weight_transfer.transport import WeightTransport

_TRANSPORTS = {"object_store": WeightTransport, "shared_memory": SharedMemoryTransport, "gloo": GlooTransport}
_TRANSPORTS |= {"nccl": NcclTransport, "ipc": IpcTransport}


def get_weight_transport(name: str) -> WeightTransport:
    """One end of the transport that is known as `rollout.weight_transport=<name>`."""
    return _TRANSPORTS[name]()
