"""Draws the pictures of docs/pictures; tests/architecture/test_generated_docs.py finds stale ones.

    python scripts/draw_pictures.py
    python scripts/draw_pictures.py colocated=RUN_DIR split=RUN_DIR detached=RUN_DIR

The second form first records a part of the timelines of three runs, from which the picture of pools
is drawn, in docs/pictures/pools.json. The recorded ones are toy jobs of the examples with the same
work on two processes: GAE with a critic, 64 prompts a step in mini-batches of 32, bypass_mode, a KL
loss, and detached at staleness 1.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from verl_like.protocol.columns import COLUMNS
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.worker import Worker
from verl_like.trainer.config.detached import DetachedBlock
from verl_like.trainer.detached.ledger import PromptLedger
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker
from verl_like.workers.rollout_worker import RolloutWorker
from verl_like.workers.teacher import TeacherWorker

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
RECORD = PICTURES / "pools.json"

WINDOW_S = 0.8
"""How much of each run is drawn."""
SHORTEST_S = 0.002
"""Shorter calls are left out."""
FIRST_GENERATION = 2
"""The picture begins with this generation after the first update of the actor, from 0."""

TITLES = {
    "colocated": "placement=colocated: generation and training take turns",
    "split": "placement=split: actor and critic train at the same time",
    "detached": "main_detached: the maker generates while the trainer trains",
}
KINDS = {
    "generation": "#4c78a8",
    "rules": "#f2a93b",
    "log-probabilities and values": "#72b06e",
    "update": "#d1605e",
    "weights": "#9d8bbf",
}
"""The kinds of calls with their colors."""
KIND_OF_METHOD = {
    "generate_sequences": "generation",
    "score": "rules",
    "compute_log_prob": "log-probabilities and values",
    "compute_ref_log_prob": "log-probabilities and values",
    "compute_values": "log-probabilities and values",
    "update_actor": "update",
    "update_critic": "update",
    "export_weights": "weights",
    "load_weights": "weights",
}
"""The methods that are drawn."""


@dataclass
class Svg:
    """A picture of shapes and texts, written line by line."""

    width: int
    height: int
    lines: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
            f'fill="{fill}"/>'
        )

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "start") -> None:
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, points: Sequence[tuple[float, float]]) -> None:
        """A line through the points, with a head at the last one."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.lines.append(
            f'<polyline points="{places}" fill="none" stroke="#555" marker-end="url(#head)"/>'
        )

    def render(self) -> str:
        """The text of the file. The ground is white, because pages may be dark."""
        start = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            'font-family="sans-serif" fill="#222">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker>'
            "</defs>",
            f'<rect width="{self.width}" height="{self.height}" fill="#fff"/>',
        ]
        return "\n".join([*start, *self.lines, "</svg>"]) + "\n"


def record_of(run_dir: Path) -> list[dict[str, Any]]:
    """The calls of a run in the window that is drawn, with times in seconds from its start."""
    lines = (run_dir / "timeline.jsonl").read_text().splitlines()
    calls = sorted(map(json.loads, lines), key=lambda call: call["started"])
    first_update = min(call["started"] for call in calls if call["method"] == "update_actor")
    starts: list[float] = []
    for call in calls:
        if call["method"] == "generate_sequences" and call["started"] > first_update:
            is_new = not starts or call["started"] - starts[-1] > SHORTEST_S
            if is_new:
                starts.append(call["started"])
    origin = starts[FIRST_GENERATION]
    found = []
    for call in calls:
        start = call["started"] - origin
        end = min(call["finished"] - origin, WINDOW_S)
        is_drawn = call["method"] in KIND_OF_METHOD and 0 <= start < WINDOW_S
        if is_drawn and end - start >= SHORTEST_S:
            place = {"pool": call["pool"], "process": call["process"], "method": call["method"]}
            found.append(place | {"start": round(start, 4), "end": round(end, 4)})
    return found


def lane_of(call: Mapping[str, Any]) -> str:
    """The row of a call: its pool and its process; reward processes are one row together."""
    if call["pool"] == "driver":
        return "reward processes"
    return f"{call['pool']}, {call['process']}"


def draw_pools(record: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What the processes of three runs did in a part of their time."""
    left = 230
    width = 960
    lane_height = 22
    seconds_to_x = (width - left - 20) / WINDOW_S
    lanes_of_part = {part: sorted({lane_of(call) for call in record[part]}) for part in TITLES}
    num_lanes = sum(map(len, lanes_of_part.values()))
    picture = Svg(width, 60 + num_lanes * lane_height + 46 * len(TITLES))
    x = 20.0
    for kind, color in KINDS.items():
        picture.box(x, 14, 12, 12, color)
        picture.text(x + 18, 24, kind)
        x += 40 + 7 * len(kind)
    y = 44.0
    for part, lanes in lanes_of_part.items():
        picture.text(20, y + 14, TITLES[part], size=13)
        y += 22
        for lane in lanes:
            picture.text(left - 8, y + 15, lane, size=11, anchor="end")
            picture.box(left, y + 2, width - left - 20, lane_height - 4, "#f3f3f3")
            for call in record[part]:
                if lane_of(call) == lane:
                    color = KINDS[KIND_OF_METHOD[call["method"]]]
                    length = max(1.0, (call["end"] - call["start"]) * seconds_to_x)
                    start = left + call["start"] * seconds_to_x
                    picture.box(start, y + 2, length, lane_height - 4, color)
            y += lane_height
        y += 24
    for tenth in range(0, 9, 2):
        place = left + tenth / 10 * seconds_to_x
        picture.text(place, y + 6, f"{tenth / 10:.1f} s", size=11, anchor="middle")
    return picture.render()


def written_by(worker: type[Worker], method: str) -> list[str]:
    """The columns that a registered method says that it writes; `?` marks those of some runs."""
    writes = registered_methods(worker)[method].writes
    assert writes is not None
    return list(writes)


def read_by(worker: type[Worker], method: str) -> list[str]:
    """The columns that a registered method says that it reads."""
    reads = registered_methods(worker)[method].reads
    assert reads is not None
    return list(reads)


DRIVER_PHASES = {
    "driver, from a greedy response": "sample",
    "driver, from the reward function": "rules",
    "driver": "reward",
    "driver, by rollout_is": "correct",
    "driver, by the advantage estimator": "estimate",
    "driver, by rollout_rs": "choose_tokens",
    "driver, by the policy loss": "choose_tokens",
    "driver, by the learner": "learn",
}
"""The phase of the driver in which a writer of the table of columns writes."""


def columns_of_driver() -> dict[str, list[str]]:
    """The tensors and arrays that the driver adds, by its phases."""
    found: dict[str, list[str]] = {phase: [] for phase in DRIVER_PHASES.values()}
    for column in COLUMNS.values():
        if column.writer.startswith("driver") and column.kind != "meta":
            found[DRIVER_PHASES[column.writer]].append(column.name)
    assert all(found.values()), f"a phase writes nothing: {found}"
    return found


def phases_of_step() -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """What each stage of a PPO step adds to the batch: (stage, [(who, columns)])."""
    driver = columns_of_driver()
    prompts = [
        column.name
        for column in COLUMNS.values()
        if column.writer == "prompt dataset" and column.kind != "meta"
    ]
    generated = written_by(RolloutWorker, "generate_sequences")
    new = [name for name in generated if name not in prompts]
    scored = [
        ("compute_log_prob", written_by(ActorWorker, "compute_log_prob")),
        ("compute_ref_log_prob", written_by(ReferenceWorker, "compute_ref_log_prob")),
        ("compute_teacher_log_prob", written_by(TeacherWorker, "compute_teacher_log_prob")),
        ("compute_values", written_by(CriticWorker, "compute_values")),
        ("compute_rm_score", written_by(RewardModelWorker, "compute_rm_score")),
        ("rules", driver["rules"]),
    ]
    of_driver = [(name, driver[name]) for name in ("reward", "correct", "estimate")]
    of_driver.append(("choose_tokens", driver["choose_tokens"]))
    updates = [
        ("update_actor reads", read_by(ActorWorker, "update_actor")),
        ("update_critic reads", read_by(CriticWorker, "update_critic")),
    ]
    return [
        ("1 prompts", [("PromptDataset", prompts)]),
        ("2 sample", [("generate_sequences", new), ("sample", driver["sample"])]),
        ("3 score", scored),
        ("4 to 7, on the driver", of_driver),
        ("8 learn", [("learn", driver["learn"]), *updates]),
    ]


def draw_batch() -> str:
    """The way of a batch through a PPO step: the columns that each phase adds."""
    stages = phases_of_step()
    stage_width = 196
    line_height = 16
    heights = [sum(28 + line_height * len(columns) for _, columns in parts) for _, parts in stages]
    picture = Svg(stage_width * len(stages) + 20, 70 + max(heights))
    for number, (stage, parts) in enumerate(stages):
        x = 14.0 + number * stage_width
        picture.text(x, 26, stage, size=14)
        if number:
            picture.arrow([(x - 24, 22), (x - 6, 22)])
        y = 40.0
        for who, columns in parts:
            height = 22 + line_height * len(columns)
            color = "#f6dfde" if "reads" in who else "#e4ecf5"
            picture.box(x, y, stage_width - 24, height, color)
            picture.text(x + 8, y + 16, who, size=12)
            for line, column in enumerate(columns):
                picture.text(x + 18, y + 33 + line * line_height, column, size=11)
            y += height + 6
    picture.text(14, picture.height - 12, "? only in runs that need it", size=11)
    return picture.render()


@dataclass
class LedgerWatch:
    """A small ledger, and how prompts change their state when its methods are called."""

    ledger: PromptLedger
    changes: list[tuple[str, str, str]] = field(default_factory=list)
    """(state before, method, state after), each once."""

    def call(self, method: str, *arguments: Any) -> Any:
        before = self.ledger.counts()
        result = getattr(self.ledger, method)(*arguments)
        self.note(method, before, self.ledger.counts())
        return result

    def note(self, method: str, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Notes from which states prompts went to which."""
        names = {**before, **after}
        grown = [name for name in names if after.get(name, 0) > before.get(name, 0)]
        shrunk = [name for name in names if after.get(name, 0) < before.get(name, 0)]
        for source in shrunk:
            for target in grown:
                # A prompt that is dropped is missing in the steps, so another one is started.
                is_of_another = target == "not_started" and len(grown) > 1
                change = (source, method, target)
                if not is_of_another and change not in self.changes:
                    self.changes.append(change)


def ledger_changes() -> list[tuple[str, str, str]]:
    """Every change of a prompt's state, as a real ledger of three steps makes it."""
    block = DetachedBlock(max_attempts=2)
    watch = LedgerWatch(PromptLedger(3, 1, block))
    watch.call("take", "maker_0.1", 0, 1)
    watch.call("lost", "maker_0.1")
    (ticket,) = watch.call("take", "maker_0.2", 0, 1)
    watch.call("deliver", "maker_0.2", [(ticket, 0)])
    for state in ("in_buffer", "training", "in_flight"):
        if state == "training":
            watch.call("choose", 0, 0, 1)
        if state == "in_flight":
            watch.call("trained", [ticket.number], 0)
            watch.call("take", "maker_0.2", 1, 1)
        before = watch.ledger.counts()
        continued = PromptLedger(3, 1, block, watch.ledger.state())
        watch.note("a resumed run", before, continued.counts())
    watch.call("lost", "maker_0.2")
    watch.call("take", "maker_0.3", 1, 1)
    watch.call("lost", "maker_0.3")
    (ticket,) = watch.call("take", "maker_0.4", 1, 1)
    watch.call("drop", "maker_0.4", [ticket])
    return watch.changes


PLACES = {
    "not_started": (20, 150),
    "in_flight": (220, 150),
    "in_buffer": (420, 150),
    "training": (620, 150),
    "trained": (820, 150),
    "again": (420, 280),
    "dropped/maker_lost": (220, 40),
    "dropped/agents_failed": (420, 40),
}
"""The upper left corner of each state."""
STATE_SIZE = (140, 44)


def draw_ledger() -> str:
    """The states of a prompt in the ledger, and the calls that change them."""
    changes = ledger_changes()
    picture = Svg(970, 380)
    width, height = STATE_SIZE
    states = {state for source, _method, target in changes for state in (source, target)}
    methods: dict[tuple[str, str], list[str]] = {}
    for source, method, target in changes:
        methods.setdefault((source, target), []).append(method)
    for (source, target), names in sorted(methods.items()):
        points = path_between(source, target)
        picture.arrow(points)
        (x1, y1), (x2, y2) = points[:2]
        label = ", ".join(names)
        x = (x1 + x2) / 2
        y = (y1 + y2) / 2 - 2
        if x1 != x2 and y1 == y2:
            y -= 4  # above a level line, and on any other
        else:
            length = 6.5 * len(label)
            picture.box(x - length / 2, y - 11, length, 15, "#fff")
        picture.text(x, y, label, size=11, anchor="middle")
    for state in sorted(states):
        x, y = PLACES[state]
        picture.box(x, y, width, height, "#e4ecf5")
        picture.text(x + width / 2, y + 27, state, size=13, anchor="middle")
    return picture.render()


def path_between(source: str, target: str) -> list[tuple[float, float]]:
    """The points of the arrow from a state to another."""
    width, height = STATE_SIZE
    x1, y1 = PLACES[source]
    x2, y2 = PLACES[target]
    if y1 == y2:
        return [(x1 + width, y1 + height / 2), (x2, y2 + height / 2)]
    if target == "again":
        offset = 30 if source == "in_flight" else 0
        start = (x1 + width / 2 + offset, y1 + height)
        return [start, (min(max(start[0], x2 + 12), x2 + width - 12), y2)]
    if source == "again":
        return [(x1, y1 + height / 2), (x2 + 30, y1 + height / 2), (x2 + 30, y2 + height)]
    return [(x1 + width / 2, y1), (x2 + width / 2, y2 + height)]


def draw() -> dict[str, str]:
    """The pictures by the names of their files."""
    record = json.loads(RECORD.read_text())
    return {"pools.svg": draw_pools(record), "batch.svg": draw_batch(), "ledger.svg": draw_ledger()}


def main(arguments: Sequence[str]) -> None:
    if arguments:
        run_dirs = dict(argument.split("=", 1) for argument in arguments)
        record = {part: record_of(Path(run_dirs[part])) for part in TITLES}
        rows = {part: [json.dumps(call) for call in calls] for part, calls in record.items()}
        parts = [f'"{part}": [\n' + ",\n".join(calls) + "\n]" for part, calls in rows.items()]
        RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    for name, text in draw().items():
        (PICTURES / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
