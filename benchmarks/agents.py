"""Episodes of agents whose engine is scripted, so that its answers cost next to nothing: what the
agents themselves cost, in CPU seconds.

* A class, two turns: the model calls the calculator of `examples/agents`, and then it answers. The
  peer is a bare loop: one process with the class in it, which renders, tokenizes and parses as
  little as it can, and has no other processes, no deadlines and no record. Tokens, masks and
  rewards are equal.
* The endpoint, four turns: a harness with OpenAI's client uses the calculator three times.
* One turn: the class beside verifiers' null harness, whose model is a scripted server. What the
  model says is equal.

Ours are the CPU seconds of the driver, of the agents' rank and, for a class, of the process that
hosts it. What a harness does in its process is the client's own, and is printed beside. So are the
engine's and Ray's. Of verifiers those of its process and of the program that it starts for each
episode count, and those of the server do not. Ratios are those of medians.
"""

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import PYTHON, Report, Side, interleave, sized
from benchmarks.sides import agents_world as world
from benchmarks.sides.agents_server import ANSWER, scripted_server

ROUNDS = sized(5, 1)
NUM_PROMPTS = sized(128, 2)
NUM_SAMPLES = sized(8, 2)
NUM_EPISODES = NUM_PROMPTS * NUM_SAMPLES
NUM_CLIENTS = sized(32, 2)
"""Prompts of the endpoint, each of which has NUM_SAMPLES episodes."""
NUM_PROGRAMS = sized(4, 1)
"""Episodes of the null harness in a round."""
OF_A_CLASS = ("driver", "agent", "hosts")
OF_THE_ENDPOINT = ("driver", "agent")
Rounds = list[dict[str, Any]]


def main() -> None:
    report = Report("agents", "Episodes of agents with a scripted engine")
    with tempfile.TemporaryDirectory() as folder:
        world.write_model(Path(folder, "model"))
        tool_class(report, folder)
        endpoint(report, folder)
        one_turn(report, folder)
    report.note(
        f"{NUM_EPISODES} episodes of a class and {NUM_CLIENTS * NUM_SAMPLES} at the endpoint in a "
        "round, at most 512 at once, on one rank with one process for the class or the harness."
    )
    report.write()


def ours(name: str, folder: str, num_prompts: int, num_turns: int, way: str) -> Side:
    """Our side, whose engine is scripted: a tool call in each turn but the last."""
    side = Side(name, "agents_ours.py", "project")
    overrides = [
        "plugins=[benchmarks.sides.agents_engine]",
        "actor_rollout_ref.rollout.name=scripted",
        f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
        f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={num_turns}",
        "data.max_prompt_length=64",
        "data.max_response_length=192",
        way,
    ]
    side.call("start", folder=folder, overrides=overrides, rows={"number": num_prompts})
    return side


def tool_class(report: Report, folder: str) -> None:
    """Two turns of a class beside the bare loop."""
    way = "agent.environment=examples.agents.calculator:Calculator"
    side = ours("class, two turns", folder, NUM_PROMPTS, 2, way)
    bare = Side("bare loop, two turns", "agents_bare.py", "project")
    bare.call("start", folder=folder, num_prompts=NUM_PROMPTS, num_samples=NUM_SAMPLES, num_turns=2)
    found: dict[str, Rounds] = {side.name: [], bare.name: []}
    for _ in range(ROUNDS + sized(1, 0)):
        of_ours = side.call("run", first=0, number=NUM_PROMPTS)
        of_bare = bare.call("run")
        check_equal(of_ours, of_bare)
        found[side.name].append(of_ours)
        found[bare.name].append(of_bare)
    side.close()
    bare.close()
    rates = {}
    for name, parts in ((side.name, OF_A_CLASS), (bare.name, ("loop",))):
        rounds = found[name][sized(1, 0) :]
        rates[name] = [NUM_EPISODES / cpu_of(one, parts) for one in rounds]
        show_parts(report, name, rounds, NUM_EPISODES, "episode")
    median = {name: statistics.median(values) for name, values in rates.items()}
    of_bare_loop = median[side.name] / median[bare.name]
    report.row(side.name, "episodes/CPU s", rates[side.name], of_the_bare_loop=of_bare_loop)
    report.row(bare.name, "episodes/CPU s", rates[bare.name])
    report.target("class, two turns, episodes a CPU second", median[side.name], ">=", 1000)


def check_equal(ours: dict[str, Any], bare: dict[str, Any]) -> None:
    """Both drew the same, train the same tokens and have the same rewards."""
    assert not ours["is_failed"].any()
    np.testing.assert_array_equal(ours["responses"], bare["responses"])
    np.testing.assert_array_equal(ours["response_mask"], bare["response_mask"])
    lasts = ours["lengths"].cumsum() - 1
    np.testing.assert_array_equal(ours["episode_scores"][lasts], bare["rewards"])


def endpoint(report: Report, folder: str) -> None:
    """Four turns of a harness."""
    num_turns = 4
    way = "agent.harness=benchmarks.sides.agents_harness:calculate"
    side = ours("endpoint, four turns", folder, NUM_CLIENTS, num_turns, way)
    [rounds] = interleave([side], ROUNDS, "run", warm_up=1, first=0, number=NUM_CLIENTS).values()
    side.close()
    num_episodes = NUM_CLIENTS * NUM_SAMPLES
    num_requests = num_episodes * num_turns
    for one in rounds:
        assert not one["is_failed"].any()
        assert one["metrics"]["agent/calls/mean"] == num_turns
        assert one["metrics"]["agent/rows/mean"] == 1
    show_parts(report, side.name, rounds, num_requests, "request")
    costs = [1e3 * cpu_of(one, OF_THE_ENDPOINT) / num_requests for one in rounds]
    report.row(f"{side.name}, without the client", "ms CPU/request", costs)
    report.target("endpoint, ms CPU a request", statistics.median(costs), "<=", 5)


def one_turn(report: Report, folder: str) -> None:
    """One turn of a class beside the null harness."""
    way = "agent.environment=examples.agents.calculator:Calculator"
    side = ours("class, one turn", folder, NUM_PROMPTS, 1, way)
    rows = world.rows(NUM_PROGRAMS)
    path = f"{Path(PYTHON['verifiers']).parent}:{os.environ['PATH']}"
    peer = Side("null harness", "agents_verifiers.py", "verifiers", variables={"PATH": path})
    costs: dict[str, list[float]] = {side.name: [], peer.name: []}
    with scripted_server() as address:
        peer.call("start", address=address)
        for index in range(ROUNDS + sized(1, 0)):
            of_ours = side.call("run", first=0, number=NUM_PROMPTS)
            is_right = of_ours["responses"].reshape(NUM_EPISODES, -1) == [*answer_tokens(folder)]
            assert is_right.all()
            of_peer = peer.call(
                "run",
                prompts=[row["prompt"] for row in rows],
                ground_truths=[row["reward_model"]["ground_truth"] for row in rows],
            )
            if peer.is_started:
                assert of_peer["replies"] == [ANSWER] * NUM_PROGRAMS, of_peer["errors"]
            if index >= sized(1, 0):
                costs[side.name].append(1e3 * cpu_of(of_ours, OF_A_CLASS) / NUM_EPISODES)
                programs = sum(of_peer["cpu"].values())
                costs[peer.name].append(1e3 * programs / NUM_PROGRAMS)
    side.close()
    peer.close()
    for name, values in costs.items():
        report.row(name, "ms CPU/episode", values)
    ratio = statistics.median(costs[peer.name]) / statistics.median(costs[side.name])
    report.target("one turn, null harness / class", ratio, ">=", 300)


def answer_tokens(folder: str) -> list[int]:
    """The tokens of the scripted engine's last turn, whose text is that of the scripted server."""
    assert world.ANSWER.startswith(ANSWER)
    return world.Script(f"{folder}/model", num_turns=1).answer


def cpu_of(result: dict[str, Any], parts: tuple[str, ...]) -> float:
    """CPU seconds of some processes. A peer that was not started has answered as ours did."""
    return sum(result["cpu"][part] for part in parts if part in result["cpu"])


def show_parts(report: Report, name: str, rounds: Rounds, number: int, unit: str) -> None:
    """Reports the CPU time of each process, in ms for one of `number` things."""
    for part in rounds[0]["cpu"]:
        values = [1e3 * one["cpu"][part] / number for one in rounds]
        report.row(f"{name}: {part}", f"ms CPU/{unit}", values)


if __name__ == "__main__":
    main()
