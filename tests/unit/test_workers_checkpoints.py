"""What a worker's checkpoint refuses, and what it never executes."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_worker_models import local_group, policy_config, write_model

from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.workers.actor import ActorWorker


def actor_group(folder: Path, tie: bool = False) -> LocalWorkerGroup:
    return local_group(ActorWorker, policy_config(write_model(folder, tie=tie)))


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_of_another_model_is_refused_by_the_first_tensor_that_does_not_fit(tmp_path: Path):
    actor_group(tmp_path / "model", tie=True).save_checkpoint(str(tmp_path / "checkpoint"))
    other = actor_group(tmp_path / "other")
    with pytest.raises(WorkerError, match=r"another model: model\.lm_head\.weight is None there, and \[\d+, 32\] here"):
        other.load_checkpoint(str(tmp_path / "checkpoint"))


def test_a_checkpoint_with_a_further_tensor_is_of_another_model(tmp_path: Path):
    actor_group(tmp_path / "model").save_checkpoint(str(tmp_path / "checkpoint"))
    other = actor_group(tmp_path / "other", tie=True)
    with pytest.raises(WorkerError, match=r"model\.lm_head\.weight is \[\d+, 32\] there, and None here"):
        other.load_checkpoint(str(tmp_path / "checkpoint"))


def test_a_checkpoint_without_the_shard_of_a_rank_is_refused(tmp_path: Path):
    group, path = actor_group(tmp_path / "model"), tmp_path / "checkpoint"
    group.save_checkpoint(str(path))
    (file,) = path.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
    tensors = load_file(file)
    name = "model.model.embed_tokens.weight"
    half = len(tensors[name]) // 2
    tensors[name], places[name]["saved_offsets"] = tensors[name][half:], [half, 0]
    save_file(tensors, file, {"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"})
    with pytest.raises(WorkerError, match=rf"has only a part of {name}"):
        group.load_checkpoint(str(path))


def test_a_pickle_in_a_checkpoint_is_not_executed(tmp_path: Path):
    path, mark = tmp_path / "checkpoint", tmp_path / "executed"
    group, payload = actor_group(tmp_path / "model"), pickle.dumps(Payload(mark))
    group.save_checkpoint(str(path))
    for name in (".metadata", "__0_0.distcp", "pytorch_model.bin"):
        (path / name).write_bytes(payload)
    group.load_checkpoint(str(path))
    (path / "shard-00002-model-00001-of-00001.safetensors").write_bytes(payload)
    with pytest.raises(WorkerError):
        group.load_checkpoint(str(path))
    assert not mark.exists()
    pickle.loads(payload)  # as it would have been  # noqa: S301
    assert mark.exists()
