"""What router replay (R3) costs: recording the routing while vLLM draws, and replaying it in an
update, in CPU seconds.

The model is that of the test of bfloat16: a Qwen3-MoE of 8 layers with 32 experts, four of which
compute a token; the engine in bfloat16, the trainer in float32. 64 prompts of 64 tokens get 64
drawn tokens each. Two processes of one thread do the same work, one with replay and one without,
in turn. They draw the same tokens. The model is small (64 hidden values), so that its layers take
little time beside what is recorded.
"""

from statistics import median

import numpy as np

from benchmarks.harness import Report, Side, interleave, sized

NUM_ROUNDS = sized(25, 1)
LIMITS = {"generate": 1.05, "update": 1.03}


def main() -> None:
    report = Report("router_replay", "The CPU seconds of router replay, one thread")
    sides = []
    for name, mode in (("with replay", "R3"), ("without", "disabled")):
        side = Side(name, "router_replay_ours.py", "project")
        side.call("start", mode=mode)
        sides.append(side)
    for function, limit in LIMITS.items():
        found = interleave(sides, NUM_ROUNDS, function)
        if function == "generate":
            for pair in zip(*found.values(), strict=True):
                assert np.array_equal(pair[0]["tokens"], pair[1]["tokens"])
        seconds = {}
        for name, results in found.items():
            seconds[name] = [result["seconds"] for result in results]
        ratio = median(seconds["with replay"]) / median(seconds["without"])
        for name, values in seconds.items():
            of_others = {"by_without": ratio} if name == "with replay" else {}
            report.row(f"{function}, {name}", "CPU s", values, **of_others)
        report.target(f"{function}, with replay / without", ratio, "<=", limit)
    for side in sides:
        side.close()
    report.write()


if __name__ == "__main__":
    main()
