"""Worker groups as Ray actors on placement groups."""

from verl_like.single_controller.ray.resource_pool import RayResourcePool, ResourcePoolManager
from verl_like.single_controller.ray.worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
)
