"""The tables of a rehearsal, and whether the run fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_like.rehearse.measured import Measured
from verl_like.rehearse.processes import Pool, Process
from verl_like.trainer.memory import CONTEXT, GB
from verl_like.trainer.memory_keys import keys_that_lower


@dataclass(frozen=True)
class AtOnce:
    """What lies on a GPU of a pool in a phase of one process."""

    process: Process
    phase: Measured
    parts: Mapping[str, float]
    """Bytes: its own, what the others keep, and what is assumed."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def beside(self) -> float:
        """Without its own."""
        return self.total - self.phase.reserved

    def __str__(self) -> str:
        sums = " + ".join(f"{name} {size / GB:.1f}" for name, size in self.parts.items())
        return f"Most on one GPU, {self.process.name}, {self.phase.phase}: {sums} = {self.total / GB:.1f} GB"


def most_at_once(pool: Pool) -> list[AtOnce]:
    """Of each process the phase in which a GPU holds most; that in which it holds most of all is the first."""
    of_processes = [
        max((_at_once(pool, process, phase) for phase in process.phases), key=lambda each: each.total)
        for process in pool.processes
    ]
    return sorted(of_processes, key=lambda each: -each.total)


Refusals = Mapping[tuple[str, str], str]
"""By pool and process, where a GPU holds more than it has in sum: what torch said at the real size; "" if it ran."""


def report(pools: Sequence[Pool], device_bytes: int, refusals: Refusals) -> tuple[str, bool]:
    """The text, and whether the run fits on GPUs of that size."""
    lines: list[str] = []
    fits = True
    for pool in pools:
        most, *_ = of_processes = most_at_once(pool)
        lines += [f"{pool.name}: {pool.num_gpus} GPUs of {device_bytes / GB:.1f} GB", *_table(pool), "", str(most)]
        over_full = [each for each in of_processes if each.total > device_bytes]
        refused = [each for each in over_full if refusals.get((pool.name, each.process.name)) != ""]
        if not over_full:
            lines.append(f"It fits: {(device_bytes - most.total) / GB:.1f} GB are left.")
        elif not refused:
            lines.append("It fits, with nothing to spare: at this size torch gives back what it keeps of freed memory.")
        for each in refused:
            fits = False
            lines += [] if each is most else [str(each)]
            said = refusals.get((pool.name, each.process.name))
            of_torch = f" Torch says: {said}" if said else ""
            lines.append(f"This does not fit.{of_torch} {keys_that_lower('device', '+'.join(each.process.roles))}")
        lines += [*_host_memory(pool), ""]
    return "\n".join(lines), fits


def _table(pool: Pool) -> list[str]:
    head = f"  {'GB':44} {'allocated':>9} {'reserved':>9} {'host heap':>9}  of what is allocated"
    rows = [head]
    for process in pool.processes:
        rows.append(f"  {process.name}")
        for phase in process.phases:
            parts = dict(phase.parts)
            rest = phase.allocated - sum(parts.values())
            parts |= {"activations and buffers": rest} if rest > GB / 20 else {}
            named = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())
            numbers = " ".join(f"{size / GB:9.1f}" for size in (phase.allocated, phase.reserved, phase.heap))
            rows.append(f"    {phase.phase:42} {numbers}  {named}")
    return rows


def _at_once(pool: Pool, process: Process, phase: Measured) -> AtOnce:
    """In a phase of one process, while the others rest."""
    parts = {"this process": float(phase.reserved)}
    others = {each.roles: each for each in pool.processes if each.roles != process.roles}
    for roles, other in others.items():
        parts[f"{'+'.join(roles)} meanwhile"] = float(other.phases[-1].reserved)
    parts["contexts (assumed)"] = CONTEXT * (1 + len(others))
    return AtOnce(process, phase, parts)


def _host_memory(pool: Pool) -> list[str]:
    """The most that the training processes on the first node hold of its memory, where rank 0 is."""
    ranks = [process for process in pool.processes if not process.is_counted]
    if not ranks:
        return []
    first, other, num_others = ranks[0], ranks[-1], pool.nodes[0] - 1
    by_phase = {
        of_first.phase: of_first.heap + num_others * of_other.heap
        for of_first, of_other in zip(first.phases, other.phases, strict=True)
    }
    phase = max(by_phase, key=lambda name: by_phase[name])
    return [
        f"Host memory of the first node, {pool.nodes[0]} processes, at most in {phase}: {by_phase[phase] / GB:.1f} GB"
    ]
