"""The report of a process that is measured: the memory of each of its phases. The last phase is
what it keeps while other processes work."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """The memory of a process in a phase, in bytes."""

    phase: str
    allocated: int
    """Most memory of the device that tensors took."""
    reserved: int
    """Most memory of the device that torch's allocator had, for tensors and beside them."""
    parts: dict[str, int]
    """The parts of `allocated` that stay on the device longer than the phase."""
    heap: int = 0
    """Memory of the host that malloc had given out, written or not, at the end of the phase, or
    while a whole model was loaded if that is more."""
    pinned: int = 0
    """Pinned memory of the host at the end of the phase, without shared memory."""
    shared: int = 0
    """Memory of the host that other processes may map, at the end of the phase."""

    @property
    def host(self) -> int:
        """All memory of the host."""
        return self.heap + self.pinned + self.shared
