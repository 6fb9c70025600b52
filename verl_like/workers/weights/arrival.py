"""Checks that the trainer's weights arrived."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_like.workers.weights.exports import WeightExport, buckets_of, iterate_weights
from verl_like.workers.weights.fingerprints import fingerprint_sum, read_fingerprints


class WeightSyncError(RuntimeError):
    """The engine's weights are not the trainer's."""


class StaleWeightsError(WeightSyncError):
    """What was sent is not there any more, for example because newer weights took its place. The
    receiver keeps the weights it has."""


def check_exports(exports: Sequence[WeightExport], version: int) -> dict[str, int]:
    """Checks that the exports are one complete set of version `version`; returns the fingerprint of
    each parameter and buffer by name.

    Raises WeightSyncError if a rank, bucket or parameter is missing or there twice, or versions or
    dtypes differ.
    """
    if not exports:
        raise WeightSyncError(f"Weights of version {version}: no rank exported anything.")

    def require(what: str, got: Any, expected: Any) -> None:
        if got != expected:
            raise WeightSyncError(
                f"Weights of version {version}, {what}: expected {expected}, got {got}."
            )

    first = exports[0]
    for export in exports:
        for what in ("world_size", "dtype", "num_tensors", "num_buckets"):
            require(f"{what} of rank {export.rank}", getattr(export, what), getattr(first, what))
        require(f"version of rank {export.rank}", export.version, version)
    buckets = buckets_of(exports)
    ranks = sorted(export.rank for export in exports)
    indices = sorted(bucket.index for bucket in buckets)
    all_ranks = [*range(first.world_size)]
    all_indices = [*range(first.num_buckets)]
    require("ranks", ranks, all_ranks)
    require("buckets", indices, all_indices)
    names: list[str] = []
    for bucket in buckets:
        names += bucket.names
    different_names = set(names)
    require("number of tensors", len(names), first.num_tensors)
    require("number of different tensors", len(different_names), first.num_tensors)
    fingerprints = {}
    for name in names:
        parts = [export.fingerprints.get(name, 0) for export in exports]
        total = sum(parts)
        fingerprints[name] = total % 2**64
    return fingerprints


def check_arrival(
    expected: Mapping[str, Any],
    loaded: Mapping[str, Any],
    failure: str,
    error: type[Exception] = WeightSyncError,
) -> str:
    """Checks that two mappings from the names of tensors are equal; returns one fingerprint of all
    of `expected` together, 64 bits in hexadecimal.

    Otherwise raises `error`, which says `failure` and which parameters or buffers differ.
    """
    different = []
    all_names = {*expected, *loaded}
    for name in sorted(all_names):
        if expected.get(name) != loaded.get(name):
            different.append(name)
    if different:
        more = ", ..." if len(different) > 5 else ""
        raise error(
            f"{failure}: {len(different)} of {len(expected)} tensors differ from the trainer's: "
            f"{', '.join(different[:5])}{more}."
        )
    all_together = repr(sorted(expected.items()))
    digest = hashlib.blake2b(all_together.encode(), digest_size=8)
    return digest.hexdigest()


def check_staged(exports: Sequence[WeightExport], version: int, device: str) -> dict[str, int]:
    """Checks that the exports are complete and hold the trainer's values, before they are loaded;
    returns the trainer's fingerprint of each tensor by name.

    `device` computes the fingerprints, of one tensor at a time. All ranks of a process group call
    it, since they load together. If a value is not the trainer's on one rank, all ranks raise
    StaleWeightsError. Raises WeightSyncError as `check_exports` does, before the ranks speak to
    each other: all have the same exports, so all refuse them.
    """
    expected = check_exports(exports, version)
    own_error: StaleWeightsError | None = None
    try:
        sums = {}
        for name, tensor in iterate_weights(exports):
            sums[name] = fingerprint_sum(tensor.to(device))
        staged = read_fingerprints(sums)
        failure = f"Weights of version {version} changed on their way"
        check_arrival(expected, staged, failure, StaleWeightsError)
    except StaleWeightsError as error:
        own_error = error
    num_refusing = torch.tensor(0.0 if own_error is None else 1.0, device=device)
    if dist.is_initialized():
        dist.all_reduce(num_refusing)
    if own_error is not None:
        raise own_error
    if num_refusing:
        raise StaleWeightsError(f"Weights of version {version} are stale on another rank.")
    return expected
