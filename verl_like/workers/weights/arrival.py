"""Checks that the trainer's weights arrived."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_like.workers.weights.exports import WeightExport, iterate_weights
from verl_like.workers.weights.fingerprints import fingerprint_sum, read_fingerprints


class WeightSyncError(RuntimeError):
    """The engine's weights are not the trainer's."""


class StaleWeightsError(WeightSyncError):
    """What was sent is not there any more, as when newer weights took its place; the receiver keeps
    what it has."""


def check_exports(exports: Sequence[WeightExport], version: int) -> dict[str, int]:
    """Checks that the exports are one complete set of version `version`; returns the fingerprint of
    each parameter and buffer by name.

    Raises WeightSyncError if a rank, bucket or parameter is missing or there twice, or versions or
    dtypes differ.
    """
    if not exports:
        raise WeightSyncError(f"Weights of version {version}: no rank exported anything.")
    first = exports[0]
    names = [name for export in exports for bucket in export.buckets for name in bucket.names]
    shared = {
        name: getattr(first, name) for name in ("world_size", "dtype", "num_tensors", "num_buckets")
    }
    shared["version"] = version
    checks: list[tuple[str, Any, Any]] = [
        *(
            (f"{name} of rank {e.rank}", getattr(e, name), value)
            for e in exports
            for name, value in shared.items()
        ),
        ("ranks", sorted(export.rank for export in exports), list(range(first.world_size))),
        (
            "buckets",
            sorted(b.index for export in exports for b in export.buckets),
            list(range(first.num_buckets)),
        ),
        ("number of tensors", len(names), first.num_tensors),
        ("number of different tensors", len(set(names)), first.num_tensors),
    ]
    for what, got, expected in checks:
        if got != expected:
            raise WeightSyncError(
                f"Weights of version {version}, {what}: expected {expected}, got {got}."
            )
    return {
        name: sum(export.fingerprints.get(name, 0) for export in exports) % 2**64 for name in names
    }


def check_arrival(
    expected: Mapping[str, Any],
    loaded: Mapping[str, Any],
    failure: str,
    error: type[Exception] = WeightSyncError,
) -> str:
    """One fingerprint of all weights together, 64 bits in hexadecimal, if the two are equal; else
    raises `error`, which says `failure` and which parameters or buffers differ.
    """
    names = sorted(
        name for name in {**expected, **loaded} if expected.get(name) != loaded.get(name)
    )
    if names:
        more = ", ..." if len(names) > 5 else ""
        raise error(
            f"{failure}: {len(names)} of {len(expected)} tensors differ from the trainer's: "
            f"{', '.join(names[:5])}{more}."
        )
    return hashlib.blake2b(repr(sorted(expected.items())).encode(), digest_size=8).hexdigest()


def check_staged(exports: Sequence[WeightExport], version: int, device: str) -> dict[str, int]:
    """The trainer's fingerprint of each tensor, by name, if the exports are complete and hold the
    trainer's values.

    `device` computes the fingerprints, of one tensor at a time. All ranks of a process group call
    it, since they load together: what one of them refuses, all do. Raises WeightSyncError as
    `check_exports` does, and StaleWeightsError if a value is not the trainer's.
    """
    expected = check_exports(exports, version)
    stale = None
    try:
        staged = read_fingerprints(
            {name: fingerprint_sum(tensor.to(device)) for name, tensor in iterate_weights(exports)}
        )
        check_arrival(
            expected,
            staged,
            f"Weights of version {version} changed on their way",
            StaleWeightsError,
        )
    except StaleWeightsError as error:
        stale = error
    num_stale = torch.tensor(float(stale is not None), device=device)
    if dist.is_initialized():
        dist.all_reduce(num_stale)
    if num_stale:
        raise stale or StaleWeightsError(f"Weights of version {version} are stale on another rank.")
    return expected
