"""What a measuring process answers: its phases, of which the last is what it keeps while other
processes work."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """The memory of a process in a phase, in bytes."""

    phase: str
    allocated: int
    """Of the device, at the peak, by tensors."""
    reserved: int
    """Of the device, at the peak, with what torch's allocator has beside them."""
    parts: dict[str, int]
    """Of `allocated`: what lies there longer than the phase."""
    heap: int = 0
    """Of the host, at its end or with a whole model that is loaded: what malloc has given out,
    written or not."""
    pinned: int = 0
    """Of the host, at its end: what CUDA has given out or was shown, without what is shared."""
    shared: int = 0
    """Of the host, at its end: pages that other processes may map."""

    @property
    def host(self) -> int:
        return self.heap + self.pinned + self.shared
