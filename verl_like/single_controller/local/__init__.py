"""Worker groups in the driver's own process."""

from verl_like.single_controller.local.worker_group import LocalWorkerGroup
