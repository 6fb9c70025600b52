"""How far the updates of actor and critic on pools of their own overlap (B7): two pools of one
worker each.

A round makes a new batch of 7 columns and updates the critic and the actor on it, each in a process
of its own; the batch travels for real. The contenders are our worker groups, driven as
`RayPPOTrainer.step` drives them (both calls are submitted, then collected), and verl's worker
groups, driven in the order of verl's trainer (it waits for the critic's result before it calls the
actor), in its faster serialization mode.

Simulated device time: a worker reads every column and then sleeps until 0.3 s have passed, as if a
GPU were busy. Real training: a worker does an optimizer step of a small network with one thread;
nothing is simulated. The network is the same plain torch code on both sides, not our training
engine, because verl's has no CPU mode.

The limit is the critical path: the longer of the two updates. For real training it is timed when
the other worker is idle, so that what the two take from each other counts against us.
"""

import numpy as np

from benchmarks.harness import Report, Side, interleave, sized

SLEEP_S = 0.3
ROUNDS, WARM_UP = sized((9, 2), (1, 0))
LARGE = sized({"rows": 256, "length": 2048}, {"rows": 8, "length": 64})  # 24 MiB
SMALL = sized(
    {"rows": 64, "length": 256}, {"rows": 8, "length": 64}
)  # 0.75 MiB; more tokens would only make the step longer


def longer_of(results: list[dict]) -> list[float]:
    """Seconds of the longer of the two updates, as the workers measured them."""
    return [
        max(float(result["actor_seconds"][0]), float(result["critic_seconds"][0]))
        for result in results
    ]


def assert_equal_outputs(ours: list[dict], verls: list[dict]) -> None:
    assert len(ours) == len(verls)
    for mine, theirs in zip(ours, verls, strict=True):
        for role in ("actor", "critic"):
            np.testing.assert_allclose(
                mine[f"{role}_result"], theirs[f"{role}_result"], rtol=1e-5, atol=1e-6
            )


def measure(
    report: Report, sides: list[Side], what: str, shape: dict, sleep_s: float, target: float
) -> None:
    """Rounds of both contenders, and of ours one update after the other, on the same batches."""
    ours, verl = sides
    results: dict[str, list[dict]] = {side.name: [] for side in sides}
    alone = []
    for seed in range(WARM_UP + ROUNDS):
        one = interleave(sides, 1, "update", warm_up=0, seed=seed, sleep_s=sleep_s, **shape)
        if seed >= WARM_UP:
            for name, result in one.items():
                results[name] += result
            if not sleep_s:
                alone.append(
                    ours.call("update", seed=seed, sleep_s=sleep_s, one_by_one=True, **shape)
                )
                # So that its models are trained as often
                verl.call("update", seed=seed, sleep_s=sleep_s, **shape)
    assert_equal_outputs(results[ours.name], results[verl.name])
    limit = float(np.median(longer_of(alone))) if alone else sleep_s
    report.row(
        f"{what}: the longer update, the other worker idle",
        "s",
        longer_of(alone) if alone else [sleep_s],
    )
    medians = {}
    for side in sides:
        walls = [result["seconds"] for result in results[side.name]]
        medians[side.name] = float(np.median(walls))
        report.row(
            f"{what}: both updates, {side.name}",
            "s",
            walls,
            of_the_critical_path=limit / medians[side.name],
        )
    report.target(f"{what}: critical path / time", limit / medians[ours.name], ">=", target)
    report.row(f"{what}: times faster than verl", "x", [medians[verl.name] / medians[ours.name]])


def main() -> None:
    report = Report("overlap", "Updates of actor and critic on pools of their own")
    sides = [
        Side("verl_like", "overlap_ours.py", "project"),
        Side(
            "verl",
            "overlap_verl.py",
            "peers",
            variables={"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"},
        ),
    ]
    for side in sides:
        side.call("start")
    measure(report, sides, "simulated device time", LARGE, SLEEP_S, 0.95)
    measure(report, sides, "real one-thread training", SMALL, 0.0, 0.85)
    report.note(
        "The simulated device sleeps 0.3 s for each update; its batch of 24 MiB is sent for real."
    )
    report.note(
        "Results of both contenders are equal in every round, losses of the training steps "
        "included."
    )
    for side in sides:
        side.close()
    report.write()


if __name__ == "__main__":
    main()
