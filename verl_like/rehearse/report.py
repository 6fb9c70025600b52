"""Writes the tables of a rehearsal, and decides whether the run fits."""

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


COLUMNS = ("allocated", "reserved", "pinned", "shared", "heap")
"""The numbers of `Measured` that the table shows."""


@dataclass(frozen=True)
class AtOnce:
    """What lies on a GPU of a pool while one process is in a phase, and the others rest."""

    process: Process
    phase: Measured
    parts: Mapping[str, float]
    """Bytes: those of the process, those that the others keep, and those that are assumed."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def beside(self) -> float:
        """The bytes that are not the process's own."""
        return self.total - self.phase.reserved

    def __str__(self) -> str:
        sums = " + ".join(_in_gb(self.parts))
        return (
            f"Most on one GPU, {self.process.name}, {self.phase.phase}: {sums} = "
            f"{self.total / GB:.1f} GB"
        )


def _in_gb(parts: Mapping[str, float]) -> list[str]:
    """The name and the size of each part."""
    return [f"{name} {size / GB:.1f}" for name, size in parts.items()]


def most_at_once(pool: Pool) -> list[AtOnce]:
    """For each process the phase in which a GPU holds most. The process whose phase has most comes
    first."""
    most = []
    for process in pool.processes:
        phases = [_at_once(pool, process, phase) for phase in process.phases]
        most.append(max(phases, key=lambda each: each.total))
    return sorted(most, key=lambda each: -each.total)


Refusals = Mapping[tuple[str, str], str]
"""By the names of pool and process, what torch said when the process ran on a GPU of the real size,
or "" if it ran without an error. Processes whose sum fits, and engines, have no entry."""


def report(pools: Sequence[Pool], device_bytes: int, refusals: Refusals) -> tuple[str, bool]:
    """Returns the text, and whether the run fits on GPUs of `device_bytes`."""
    lines = []
    fits = True
    for pool in pools:
        of_processes = most_at_once(pool)
        most = of_processes[0]
        lines.append(f"{pool.name}: {pool.num_gpus} GPUs of {device_bytes / GB:.1f} GB")
        lines += _table(pool)
        lines += ["", str(most)]
        is_over_full = False
        is_refused = False
        for each in of_processes:
            process = each.process
            if each.total <= device_bytes and not process.refusal:
                continue
            is_over_full = True
            said = refusals.get((pool.name, process.name))
            if said == "":  # it ran on a GPU of the real size
                continue
            is_refused = True
            if each is not most:
                lines.append(str(each))
            reason = f" Torch says: {said}" if said else ""
            advice = keys_that_lower("device", "+".join(process.roles))
            if process.refusal:
                reason = f" The engine says: {process.refusal}"
                advice = ADVICE_FOR_ENGINES
            lines.append(f"This does not fit.{reason} {advice}")
        if is_refused:
            fits = False
        elif is_over_full:
            lines.append(
                "It fits, with nothing to spare: at this size torch gives back what it keeps of "
                "freed memory."
            )
        else:
            bytes_left = device_bytes - most.total
            lines.append(f"It fits: {bytes_left / GB:.1f} GB are left.")
        lines += _host_memory(pool)
        lines.append("")
    return "\n".join(lines), fits


def _table(pool: Pool) -> list[str]:
    """A row for each phase of each process."""
    columns = " ".join(f"{column:>9}" for column in COLUMNS)
    rows = [f"  {'GB':44} {columns}  of what is allocated"]
    for process in pool.processes:
        rows.append(f"  {process.name}")
        for phase in process.phases:
            parts = dict(phase.parts)
            rest = phase.allocated - sum(parts.values())
            if rest > GB / 20:
                parts["activations and buffers"] = rest
            named = ", ".join(_in_gb(parts))
            sizes = [getattr(phase, column) for column in COLUMNS]
            numbers = " ".join(f"{size / GB:9.1f}" for size in sizes)
            rows.append(f"    {phase.phase:42} {numbers}  {named}")
        if process.note:
            rows.append(f"    {process.note}")
    return rows


def _at_once(pool: Pool, process: Process, phase: Measured) -> AtOnce:
    """What lies on a GPU in a phase of one process, while the others rest."""
    parts = {"this process": float(phase.reserved)}
    others = {}
    for each in pool.processes:
        if each.roles != process.roles:
            others["+".join(each.roles)] = each
    for roles, other in others.items():
        parts[f"{roles} meanwhile"] = float(other.phases[-1].reserved)
    parts["contexts (assumed)"] = CONTEXT * (1 + len(others))
    return AtOnce(process, phase, parts)


def _host_memory(pool: Pool) -> list[str]:
    """For the training processes, and for the engines, the most that those on the first node take
    of its memory. Rank 0 is there."""
    num_others = pool.nodes[0] - 1
    lines = []
    ranks = []
    engines = []
    for process in pool.processes:
        if Role.Rollout in process.roles:
            engines.append(process)
        else:
            ranks.append(process)
    if ranks:
        lines.append(_most_of_host("training", ranks[0], ranks[-1], num_others))
    for engine in engines:
        # Of a counted engine no process ran, so the plan has no numbers of its host memory.
        if not engine.is_counted:
            lines.append(_most_of_host("engine", engine, engine, num_others))
    return lines


def _most_of_host(what: str, first: Process, other: Process, num_others: int) -> str:
    """Describes the phase in which `first` and `num_others` processes like `other` take most."""
    pairs = zip(first.phases, other.phases, strict=True)
    own, others = max(pairs, key=lambda pair: pair[0].host + num_others * pair[1].host)
    parts = {}
    for name in ("pinned", "shared", "heap"):
        parts[name] = getattr(own, name) + num_others * getattr(others, name)
    sums = " + ".join(_in_gb(parts))
    total = sum(parts.values())
    return (
        f"Host memory of the first node, {num_others + 1} {what} processes, at most in "
        f"{own.phase}: {sums} = {total / GB:.1f} GB"
    )
