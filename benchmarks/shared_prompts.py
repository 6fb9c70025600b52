"""What an update and a pass of log-probabilities take if rows with the same prompt compute it once
(`use_prefix_grouper`), beside whole rows.

The Llama of `grpo_step` in float32, 4 prompts of 32, 128 or 512 tokens with 8 responses of 128
tokens each, micro-batches of 16 rows. Two processes of one thread do the same work in turn.

Limit: the share of the tokens that are computed. The head does the same work both ways.
"""

import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import Report, Side, interleave, sized
from benchmarks.sides import grpo_world as world

NUM_ROUNDS = sized(9, 1)
NUM_PROMPTS = 4
NUM_SAMPLES = 8
RESPONSE_LENGTH = sized(128, 8)
PROMPT_LENGTHS = sized((32, 128, 512), (4,))


def main() -> None:
    report = Report("shared_prompts", "Prompts that a pass computes once, one thread")
    with tempfile.TemporaryDirectory() as folder:
        world.make_model(
            Path(folder),
            vocab_size=world.VOCABULARY,
            hidden=256,
            layers=4,
            intermediate=768,
            positions=1024,
        )
        for prompt_length in PROMPT_LENGTHS:
            compare(report, folder, prompt_length)
    report.write()


def compare(report: Report, model: str, prompt_length: int) -> None:
    sides = []
    for name, shares in (("prompts once", True), ("whole rows", False)):
        side = Side(name, "shared_prompts_ours.py", "project")
        side.call(
            "start",
            model=model,
            shares=shares,
            num_prompts=NUM_PROMPTS,
            num_samples=NUM_SAMPLES,
            prompt_length=prompt_length,
            response_length=RESPONSE_LENGTH,
        )
        sides.append(side)
    num_whole = NUM_SAMPLES * (prompt_length + RESPONSE_LENGTH)
    share_of_tokens = (num_whole - (NUM_SAMPLES - 1) * prompt_length) / num_whole
    for function in ("score", "update"):
        found = interleave(sides, NUM_ROUNDS, function)
        once = found["prompts once"]
        whole = found["whole rows"]
        for results in zip(once, whole, strict=True):
            assert np.allclose(results[0]["values"], results[1]["values"], rtol=1e-3, atol=1e-4)
        seconds = {
            name: [result["seconds"] for result in results] for name, results in found.items()
        }
        ratio = median(seconds["prompts once"]) / median(seconds["whole rows"])
        for name, values in seconds.items():
            ratios = {}
            if name == "prompts once":
                ratios = {"by_whole_rows": ratio, "by_tokens": share_of_tokens}
            report.row(f"{function}, prompts of {prompt_length}, {name}", "s", values, **ratios)
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
