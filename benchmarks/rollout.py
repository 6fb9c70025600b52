"""Generation with long-tailed lengths (B6): 64 prompts of 32 tokens, responses of 80 tokens on
average and 318 at most.

Ours is the project's rollout engine with vLLM in one process, from padded prompts to padded,
checked responses with log-probabilities; the peer is `generate` of transformers on one static
batch, as TRL's GRPO generates on a CPU, without log-probabilities. Both have one thread, the same
random Qwen2 in float32 and the same prompts, and draw at temperature 1. Lengths are forced: ours by
the `max_tokens` of each request, the peer's batch by its longest response, which is when it would
stop if an end token had ended the others. Useful tokens are those up to the wanted length.

The limit is that of perfect refilling: sum(lengths) / sum over steps t of step_cost(responses
longer than t). The cost of a decoding step is measured on the same engine with 1 to 64 responses,
and interpolated. All 64 fit at once, so a step has fewer responses as they end. Prefill, checks and
padding count against us.

What a seed for each response costs is shown by the same generation with all responses drawn from
one stream.

Control: greedy responses of 24 tokens are equal, token by token.
"""

import shutil

import numpy as np

from benchmarks.harness import Report, Side, interleave, sized
from benchmarks.sides.rollout_data import NUM_PROMPTS, lengths

ROUNDS, WARM_UP = sized((5, 1), (1, 0))
SIZES = sized([1, 2, 4, 8, 16, 32, 64], [1, 4])
CONTROL_LENGTH = sized(24, 4)


def refill_seconds(wanted: list[int], costs: dict[str, float]) -> float:
    """Decoding steps of responses that all start together, each step at the cost of those that
    still run."""
    sizes = sorted(map(int, costs))
    running = (np.array(wanted)[:, None] > np.arange(max(wanted))).sum(0)
    return float(np.interp(running, sizes, [costs[str(size)] for size in sizes]).sum())


def main() -> None:
    report = Report("rollout", "Generation with long-tailed lengths")
    ours, peer = sides = [
        Side("verl_like", "rollout_ours.py", "project"),
        Side("transformers", "rollout_transformers.py", "peers"),
    ]
    made = ours.call("start")
    peer.call("start", folder=made["folder"])
    responses = [
        side.call("greedy", seed=100, length=CONTROL_LENGTH)["responses"] for side in sides
    ]
    np.testing.assert_array_equal(*responses)

    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    limits = []
    fractions = []
    unseeded = []
    for seed in range(WARM_UP + ROUNDS):
        costs = ours.call("step_costs", seed=1000 + seed, sizes=SIZES)["costs"]
        one = interleave(sides, 1, "generate", warm_up=0, seed=seed)
        plain = ours.call("generate", seed=seed, with_seeds=False)
        if seed < WARM_UP:
            continue
        unseeded.append(plain["tokens"] / plain["seconds"])
        for name, (result,) in one.items():
            speeds[name].append(result["tokens"] / result["seconds"])
        limits.append(sum(lengths(seed)) / refill_seconds(lengths(seed), costs))
        fractions.append(speeds[ours.name][-1] / limits[-1])
    ratio = float(np.median(np.array(speeds[ours.name]) / np.array(speeds[peer.name])))
    fraction = float(np.median(fractions))
    report.row("limit with perfect refilling", "useful tokens/s", limits)
    report.row(ours.name, "useful tokens/s", speeds[ours.name], of_the_limit=fraction)
    seeded_ratio = float(np.median(np.array(unseeded) / np.array(speeds[ours.name])))
    report.row(
        f"{ours.name}, no seed of its own for a response",
        "useful tokens/s",
        unseeded,
        of_seeded=seeded_ratio,
    )
    report.row(peer.name, "useful tokens/s", speeds[peer.name])
    for size in SIZES:
        report.row(f"a decoding step of {size} responses", "ms", [1e3 * costs[str(size)]])
    report.target("times transformers' useful tokens/s", ratio, ">=", 2.5)
    report.target("of the limit", fraction, ">=", 0.7)
    wanted = lengths(1)
    report.note(
        f"{NUM_PROMPTS} responses, {np.mean(wanted):.0f} tokens on average, {max(wanted)} at "
        f"most; a model of {made['num_parameters'] / 1e6:.1f} million parameters, float32, one "
        "thread each."
    )
    for side in sides:
        side.close()
    shutil.rmtree(made["folder"])
    report.write()


if __name__ == "__main__":
    main()
