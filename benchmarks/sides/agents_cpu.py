"""CPU seconds of processes, for the sides of the benchmarks of agents."""

import contextlib

import psutil


def seconds_of(process: psutil.Process) -> float:
    """Of a process alone."""
    times = process.cpu_times()
    return times.user + times.system


def seconds_below(process: psutil.Process) -> float:
    """Of all processes that it has started, and those that these have."""
    times = process.cpu_times()
    seconds = times.children_user + times.children_system  # of those that have ended
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += seconds_of(child) + seconds_below(child)
    return seconds
