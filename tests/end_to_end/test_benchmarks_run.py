"""Every benchmark runs at a size of seconds: our side of the quick ones in `make test`,
all sides of all in `make proofs`."""

import subprocess

import pytest
from small_benchmarks import BENCHMARKS, SLOW, WITHOUT_A_SIDE_OF_OURS, run_small

from benchmarks.harness import ROOT


def test_all_that_is_said_of_benchmarks_is_said_of_those_that_are_there():
    assert BENCHMARKS > WITHOUT_A_SIDE_OF_OURS | SLOW


@pytest.mark.parametrize("name", sorted(BENCHMARKS - WITHOUT_A_SIDE_OF_OURS - SLOW))
def test_our_side_of_each_quick_benchmark_runs(name: str):
    run_small(name, BENCHMARK_SIDES="ours")


@pytest.fixture(scope="module")
def peers() -> None:
    """The peers' environment, which takes a few minutes to make."""
    subprocess.run(["bash", str(ROOT / "benchmarks" / "setup_peers.sh")], check=True, timeout=1700)


@pytest.mark.proof
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_runs_with_its_peers(name: str, peers: None):
    run_small(name)
