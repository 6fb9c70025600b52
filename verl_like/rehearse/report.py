"""The tables of a rehearsal, and whether the run fits."""

from collections.abc import Sequence

from verl_like.rehearse.measured import Measured
from verl_like.rehearse.processes import Pool, Process
from verl_like.trainer.memory import CONTEXT, GB
from verl_like.trainer.memory_keys import keys_that_lower


def report(pools: Sequence[Pool], device_bytes: int) -> tuple[str, bool]:
    """The text, and whether every phase fits on a GPU of that size."""
    lines: list[str] = []
    fits = True
    for pool in pools:
        lines += [f"{pool.name}: {pool.num_gpus} GPUs of {device_bytes / GB:.1f} GB", *_table(pool), ""]
        largest, phase, parts = max((_at_once(pool, process, each) for process, each in _phases(pool)), key=_total)
        sums = " + ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())
        total = sum(parts.values())
        lines.append(f"Most on one GPU, {largest.name}, {phase.phase}: {sums} = {total / GB:.1f} GB")
        if total > device_bytes:
            fits = False
            lines.append(f"This does not fit. {keys_that_lower('device', '+'.join(largest.roles))}")
        else:
            lines.append(f"It fits: {(device_bytes - total) / GB:.1f} GB are left.")
        lines.append("")
    return "\n".join(lines), fits


def _phases(pool: Pool) -> list[tuple[Process, Measured]]:
    return [(process, phase) for process in pool.processes for phase in process.phases]


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


def _at_once(pool: Pool, process: Process, phase: Measured) -> tuple[Process, Measured, dict[str, float]]:
    """What lies on a GPU in a phase of one process: its own, what the others keep, and what is assumed."""
    parts = {"this process": float(phase.reserved)}
    others = {each.roles: each for each in pool.processes if each.roles != process.roles}
    for roles, other in others.items():
        parts[f"{'+'.join(roles)} meanwhile"] = float(other.phases[-1].reserved)
    parts["contexts (assumed)"] = CONTEXT * (1 + len(others))
    return process, phase, parts


def _total(at_once: tuple[Process, Measured, dict[str, float]]) -> float:
    return sum(at_once[2].values())
