"""Processes of ranks: forks of one process that has imported what all of them need."""

import multiprocessing
import os
from multiprocessing.context import BaseContext

from verl_like.trainer.main_ppo import WORKERS

TESTS = ("pytest", "verl_like.trainer.main_ppo", "transformers.models.llama.modeling_llama")
"""Most of what the modules of tests import besides, which takes half a second in each process."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([*WORKERS, *TESTS])


def start_method() -> str:
    """The name of what starts a rank.

    Where scripts/mutant_runs.py measures which test runs which line, a process reports to the test
    that was running when it started, and so must be a new one.
    """
    return "spawn" if "COVERED_TEST" in os.environ else "forkserver"


def ranks() -> BaseContext:
    """The same for an executor."""
    return multiprocessing.get_context(start_method())
