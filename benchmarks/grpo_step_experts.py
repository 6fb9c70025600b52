"""A whole GRPO step of a mixture of experts on the CPU: verl_like's trainer with router replay of
vLLM's routing (R3), and without, against TRL's GRPOTrainer, as `grpo_step` does it.

A random Qwen3-MoE in float32, of eight experts two of which compute a token. Both sides compute the
experts by transformers' grouped_mm, their default. All responses have 128 tokens.

Limit: that of `grpo_step`, with the parameters that compute a token.
"""

import tempfile
from pathlib import Path

from benchmarks.grpo_step import THREADS, matrix_product_rate, run_steps, show
from benchmarks.harness import Report
from benchmarks.sides import grpo_world as world

REPLAY = ["actor_rollout_ref.actor.router_replay.mode=R3"]


def main() -> None:
    report = Report(
        "grpo_step_experts",
        f"A GRPO step of a mixture of experts, {THREADS} threads in turn: verl_like against TRL",
    )
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden": 256, "layers": 4, "intermediate": 768, "positions": 256}
        num_active = world.make_model(
            Path(folder, "model"), vocab_size=world.VOCABULARY, num_experts=8, **shape
        )
        world.write_prompts(Path(folder, "prompts.parquet"), world.speed_prompts())
        rates = [matrix_product_rate()]
        found = run_steps(folder, num_laws=1, replay=REPLAY)
    rates.append(matrix_product_rate())
    report.row(
        "product of 1536 x 1536 matrices, float32", "GFLOP/s", [rate / 1e9 for rate in rates]
    )
    steps = {name: of_side[1:] for name, of_side in found.items()}  # the first warms up
    limit = max(rates) / (8 * num_active)
    without = {name: of_side for name, of_side in steps.items() if name != "replay"}
    with_replay = without | {"ours": steps["replay"]}
    ratio = show(report, "with replay", with_replay, limit)
    report.target("with replay, ours / the better TRL", ratio, ">=", 1.3)
    show(report, "without replay", {"ours": without["ours"]} | without, limit)
    report.write()


if __name__ == "__main__":
    main()
