"""Our side of the benchmarks that start Ray runs at a size of seconds."""

import pytest
from small_benchmarks import SLOW, STARTING_RAY, run_small


@pytest.mark.ray
@pytest.mark.parametrize("name", sorted(STARTING_RAY - SLOW))
def test_our_side_of_each_quick_benchmark_on_ray_runs(name: str):
    run_small(name, BENCHMARK_SIDES="ours")
