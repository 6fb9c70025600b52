"""Every algorithm that verl has, beside verl's function on the same batches: no times, the largest
differences.

Only what both define is compared; where the definitions differ, the algorithm's file says so.
Batches have no skipped responses and no groups of one response. The two run in one process, in the
peers' environment.
"""

from benchmarks.harness import Side

SCRIPTS = ("estimators_beside_verl.py", "losses_beside_verl.py")
BATCHES = 20
LARGEST = 1e-5


def main() -> None:
    found: dict[str, float] = {}
    for script in SCRIPTS:
        side = Side("both", script, "peers")
        for seed in range(BATCHES):
            for name, difference in side.call("differences", seed=seed).items():
                found[name] = max(found.get(name, 0.0), difference)
        side.close()
    print(
        f"The largest difference from verl's results on the response tokens of {BATCHES} batches\n"
    )
    for name, difference in found.items():
        print(f"{name:32} {difference:.1e}")
    too_large = {
        name: difference for name, difference in found.items() if not difference <= LARGEST
    }
    assert not too_large, f"further from verl's than {LARGEST}: {too_large}"


if __name__ == "__main__":
    main()
