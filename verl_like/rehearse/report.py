"""The tables of a rehearsal, and whether the run fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_like.rehearse.measured import Measured
from verl_like.rehearse.processes import Pool, Process
from verl_like.trainer.config.roles import Role
from verl_like.trainer.memory.keys import keys_that_lower
from verl_like.trainer.memory.sums import CONTEXT, GB

_ROLLOUT = "actor_rollout_ref.rollout"
ADVICE_FOR_ENGINES = (
    f"What gives an engine room: a larger {_ROLLOUT}.gpu_memory_utilization; a smaller "
    f"{_ROLLOUT}.max_num_batched_tokens; shorter data.max_prompt_length and "
    f"data.max_response_length; {_ROLLOUT}.tensor_model_parallel_size=2. See docs/memory.md."
)


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
        return (
            f"Most on one GPU, {self.process.name}, {self.phase.phase}: {sums} = "
            f"{self.total / GB:.1f} GB"
        )


def most_at_once(pool: Pool) -> list[AtOnce]:
    """Of each process the phase in which a GPU holds most; that in which it holds most of all is
    the first."""
    of_processes = [
        max(
            (_at_once(pool, process, phase) for phase in process.phases),
            key=lambda each: each.total,
        )
        for process in pool.processes
    ]
    return sorted(of_processes, key=lambda each: -each.total)


Refusals = Mapping[tuple[str, str], str]
"""By pool and process, where a GPU holds more than it has in sum: what torch said at the real size;
"" if it ran."""


def report(pools: Sequence[Pool], device_bytes: int, refusals: Refusals) -> tuple[str, bool]:
    """The text, and whether the run fits on GPUs of that size."""
    lines: list[str] = []
    fits = True
    for pool in pools:
        most, *_ = of_processes = most_at_once(pool)
        lines += [
            f"{pool.name}: {pool.num_gpus} GPUs of {device_bytes / GB:.1f} GB",
            *_table(pool),
            "",
            str(most),
        ]
        over_full = [
            each for each in of_processes if each.total > device_bytes or each.process.refusal
        ]
        refused = [each for each in over_full if refusals.get((pool.name, each.process.name)) != ""]
        if not over_full:
            lines.append(f"It fits: {(device_bytes - most.total) / GB:.1f} GB are left.")
        elif not refused:
            lines.append(
                "It fits, with nothing to spare: at this size torch gives back what it keeps of "
                "freed memory."
            )
        for each in refused:
            fits = False
            lines += [] if each is most else [str(each)]
            said = refusals.get((pool.name, each.process.name))
            advice = keys_that_lower("device", "+".join(each.process.roles))
            of_torch = f" Torch says: {said}" if said else ""
            if each.process.refusal:
                of_torch = f" The engine says: {each.process.refusal}"
                advice = ADVICE_FOR_ENGINES
            lines.append(f"This does not fit.{of_torch} {advice}")
        lines += [*_host_memory(pool), ""]
    return "\n".join(lines), fits


def _table(pool: Pool) -> list[str]:
    columns = ("allocated", "reserved", "pinned", "shared", "heap")
    head = f"  {'GB':44} {' '.join(f'{column:>9}' for column in columns)}  of what is allocated"
    rows = [head]
    for process in pool.processes:
        rows.append(f"  {process.name}")
        for phase in process.phases:
            parts = dict(phase.parts)
            rest = phase.allocated - sum(parts.values())
            parts |= {"activations and buffers": rest} if rest > GB / 20 else {}
            named = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())
            sizes = (phase.allocated, phase.reserved, phase.pinned, phase.shared, phase.heap)
            numbers = " ".join(f"{size / GB:9.1f}" for size in sizes)
            rows.append(f"    {phase.phase:42} {numbers}  {named}")
        rows += [f"    {process.note}"] if process.note else []
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
    """The most that the training processes on the first node hold of its memory, where rank 0 is,
    and the engines."""
    ranks = [process for process in pool.processes if Role.Rollout not in process.roles]
    engines = [
        process
        for process in pool.processes
        if Role.Rollout in process.roles and not process.is_counted
    ]
    num_processes = pool.nodes[0]
    lines = []
    if ranks:
        first = ranks[0]
        other = ranks[-1]
        pairs = zip(first.phases, other.phases, strict=True)
        lines.append(
            _most_of_host("training", [(one, each, num_processes - 1) for one, each in pairs])
        )
    for engine in engines:
        lines.append(
            _most_of_host("engine", [(phase, phase, num_processes - 1) for phase in engine.phases])
        )
    return lines


def _most_of_host(what: str, phases: Sequence[tuple[Measured, Measured, int]]) -> str:
    """In words, of the phases of one process and so many others."""
    first, other, num_others = max(
        phases, key=lambda phase: phase[0].host + phase[2] * phase[1].host
    )
    sizes = {
        name: (getattr(first, name) + num_others * getattr(other, name)) / GB
        for name in ("pinned", "shared", "heap")
    }
    sums = " + ".join(f"{name} {size:.1f}" for name, size in sizes.items())
    total = sum(sizes.values())
    return (
        f"Host memory of the first node, {num_others + 1} {what} processes, at most in "
        f"{first.phase}: {sums} = {total:.1f} GB"
    )
