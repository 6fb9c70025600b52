"""Episodes of agents at the endpoint, with a tiny Llama on vLLM: each harness talks with the model
for some turns of 24 tokens, by OpenAI's client, greedily. Each engine has one thread.

* 64 episodes of five turns beside vLLM's own server, which gets the same requests with the same
  settings and records nothing. What the model says is equal, but where a rounding flips a draw.
  Ours are the CPU seconds of the driver, of the agents' rank and of the engine, theirs those of the
  server and of its engine. Those of the clients are printed beside.
* 512 such episodes at once: all end, and how long a turn takes, as its client sees it.
* Eight turns after a prompt of 1,500 tokens, beside the same engine without a prefix cache: CPU
  seconds of all that is ours.
"""

import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Report, Side, sized
from benchmarks.sides import agents_world as world
from benchmarks.sides.agents_harness import MAX_TOKENS

ROUNDS = sized(3, 1)
NUM_EPISODES = sized(64, 2)
NUM_TURNS = sized(5, 2)
NUM_AT_ONCE = sized(512, 4)
NUM_LONG = sized(8, 2)
"""Episodes with long prompts in a round."""
NUM_LONG_TURNS = sized(8, 2)
LONG_PROMPT = sized(1500, 300)
RESPONSE = 448
"""Tokens behind a prompt, which all turns have room in."""
MAX_FLIPPED = 1 / 16
"""The share of episodes in which a rounding may flip a draw."""
OURS = ("driver", "agent", "engine")


def main() -> None:
    report = Report("agents_vllm", "Episodes of agents at the endpoint, with vLLM")
    with tempfile.TemporaryDirectory() as folder:
        world.write_model(Path(folder, "model"))
        beside_the_server(report, folder)
        after_long_prompts(report, folder)
    report.write()


def ours(name: str, folder: str, engine: str, prompt_length: int, rows: dict[str, int]) -> Side:
    side = Side(name, "agents_ours.py", "project")
    overrides = [
        "plugins=[benchmarks.sides.agents_vllm_engines]",
        f"actor_rollout_ref.rollout.name={engine}",
        "actor_rollout_ref.rollout.dtype=float32",
        f"actor_rollout_ref.rollout.max_num_seqs={NUM_AT_ONCE}",
        f"data.max_prompt_length={prompt_length}",
        f"data.max_response_length={RESPONSE}",
        "agent.harness=benchmarks.sides.agents_harness:talk",
    ]
    side.call("start", folder=folder, overrides=overrides, rows=rows)
    return side


def beside_the_server(report: Report, folder: str) -> None:
    """Some episodes beside vLLM's server, and many at once."""
    prompt_length = 64
    rows = {"number": NUM_AT_ONCE, "num_turns": NUM_TURNS}
    side = ours("endpoint", folder, "vllm_one_thread", prompt_length, rows)
    peer = Side("vLLM's server", "agents_vllm_server.py", "project")
    peer.call(
        "start",
        folder=folder,
        port=free_port(),
        rows=rows,
        context=prompt_length + RESPONSE,
        max_num_seqs=NUM_AT_ONCE,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"{folder}/model")
    num_requests = NUM_EPISODES * NUM_TURNS
    found: dict[str, list[dict[str, Any]]] = {side.name: [], peer.name: []}
    num_flipped = 0
    chosen = {"first": 0, "number": NUM_EPISODES}
    for _ in range(sized(1, 0) + ROUNDS):
        of_ours = side.call("run", is_greedy=True, **chosen)
        of_peer = peer.call("run", **chosen)
        assert not of_ours["is_failed"].any()
        said = texts_of(of_ours, tokenizer)
        pairs = zip(said, of_peer["texts"], strict=True)
        num_flipped += sum(one != other for one, other in pairs)
        found[side.name].append(of_ours)
        found[peer.name].append(of_peer)
    peer.close()
    costs = {}
    for name, parts in ((side.name, OURS), (peer.name, ("server",))):
        rounds = found[name][sized(1, 0) :]
        for part in rounds[0]["cpu"]:
            values = [1e3 * one["cpu"][part] / num_requests for one in rounds]
            report.row(f"{name}: {part}", "ms CPU/request", values)
        report.row(f"{name}: by the wall", "s", [one["seconds"] for one in rounds])
        costs[name] = [
            1e3 * sum(one["cpu"][part] for part in parts) / num_requests for one in rounds
        ]
        report.row(f"{name}, without the clients", "ms CPU/request", costs[name])
    ratio = statistics.median(costs[side.name]) / statistics.median(costs[peer.name])
    report.target("CPU of the endpoint / vLLM's server", ratio, "<=", 1.2)
    share = num_flipped / (len(found[side.name]) * NUM_EPISODES)
    report.target("share of episodes where a draw flipped", share, "<=", MAX_FLIPPED)
    many_at_once(report, side)
    side.close()


def many_at_once(report: Report, side: Side) -> None:
    """How long turns take while there are many."""
    medians = []
    lates = []
    for _ in range(ROUNDS):
        one = side.call("run", first=0, number=NUM_AT_ONCE, is_greedy=True)
        assert not one["is_failed"].any()
        seconds = one["episode_scores"][one["episode_scores"] > 0]
        assert len(seconds) == NUM_AT_ONCE * NUM_TURNS
        median, late = np.percentile(seconds, [50, 99])
        medians.append(median)
        lates.append(late)
    report.row(f"{NUM_AT_ONCE} episodes at once: a turn, p50", "s", medians)
    report.row(f"{NUM_AT_ONCE} episodes at once: a turn, p99", "s", lates)
    ratio = statistics.median(np.array(lates) / np.array(medians))
    report.target(f"{NUM_AT_ONCE} at once, a turn, p99 / p50", ratio, "<=", 3)


def after_long_prompts(report: Report, folder: str) -> None:
    """Many turns after long prompts, with a prefix cache and without."""
    rows = {
        "number": NUM_LONG * (ROUNDS + 1),
        "num_characters": LONG_PROMPT,
        "num_turns": NUM_LONG_TURNS,
    }
    prompt_length = LONG_PROMPT + 64
    cached = ours("with a prefix cache", folder, "vllm_one_thread", prompt_length, rows)
    uncached = ours("without one", folder, "vllm_uncached", prompt_length, rows)
    num_requests = NUM_LONG * NUM_LONG_TURNS
    costs: dict[str, list[float]] = {cached.name: [], uncached.name: []}
    hits = []
    for index in range(ROUNDS + 1):
        for side in (cached, uncached):
            # Prompts of their own in each round: none is in the cache
            one = side.call("run", first=index * NUM_LONG, number=NUM_LONG, is_greedy=True)
            assert not one["is_failed"].any()
            if index == 0:
                continue
            ms = 1e3 * sum(one["cpu"][part] for part in OURS) / num_requests
            costs[side.name].append(ms)
            if side is cached:
                hits.append(one["metrics"]["rollout/prefix_cache_hit_rate"])
    cached.close()
    uncached.close()
    for name, values in costs.items():
        report.row(f"{NUM_LONG_TURNS} turns, {name}", "ms CPU/request", values)
    report.row("hits of the prefix cache", "of the tokens of prompts", hits)
    ratio = statistics.median(costs[cached.name]) / statistics.median(costs[uncached.name])
    report.target("CPU with a prefix cache / without", ratio, "<=", 0.6)
    report.target("hits of the prefix cache", statistics.median(hits), ">=", 0.8)


def texts_of(result: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[list[str]]:
    """What the model said in each turn of each episode."""
    drawn = result["responses"][result["response_mask"] == 1]
    turns = tokenizer.batch_decode(drawn.reshape(-1, MAX_TOKENS))
    return [turns[first : first + NUM_TURNS] for first in range(0, len(turns), NUM_TURNS)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    main()
