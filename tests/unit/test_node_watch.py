"""What an agent sees of stopped processes, without Ray."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from verl_like.single_controller.ray.node_watch import NodeAgent


@pytest.mark.parametrize(("options", "is_seen"), [({}, True), ({"process_group": 0}, False)])
def test_a_stopped_child_is_seen_unless_it_has_a_process_group_of_its_own(options, is_seen):
    program = "import time; time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", program], **options)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        stopped = NodeAgent().look([os.getpid()]).stopped
        assert list(stopped.get(os.getpid(), {})) == ([child.pid] if is_seen else [])
    finally:
        child.kill()
        child.wait(timeout=30)
