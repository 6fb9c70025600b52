"""Processes of ranks and readers: forks of one process that has imported what all of them need."""

import multiprocessing

from verl_like.trainer.main_ppo import WORKERS

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(WORKERS)
START_METHOD = "forkserver"
"""The same for `torch.multiprocessing.start_processes`."""
