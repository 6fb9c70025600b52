"""Child processes that start without the driver's modules, in a file of their own because they import it."""

import signal
import sys
import threading
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

_MAIN_MODULE_LOCK = threading.Lock()


class LightSpawnProcess(SpawnProcess):
    """A spawned process that does not import the driver's `__main__`: that loads torch and Ray in every worker."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        with _MAIN_MODULE_LOCK:
            main_module = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")  # has no file and no spec: nothing to import again
            # The child inherits the mask: Ctrl-C is for the driver, which then stops its workers.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                sys.modules["__main__"] = main_module


class LightSpawnContext(SpawnContext):
    Process = LightSpawnProcess
