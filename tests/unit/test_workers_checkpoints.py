"""What a worker writes while it trains, what its checkpoint refuses, and what it never executes."""

import contextlib
import hashlib
import json
import pickle
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_worker_models import local_group, make_batch, parameters_of, policy_config, write_model

from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.workers.actor import ActorWorker
from verl_like.workers.engine.shard_writer import ShardWriter
from verl_like.workers.models.pretrained import save_settings


def actor_group(folder: Path, tie: bool = False) -> LocalWorkerGroup:
    return local_group(ActorWorker, policy_config(write_model(folder, tie=tie)))


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@contextlib.contextmanager
def writing_is_held_up(group: LocalWorkerGroup) -> Iterator[None]:
    """Within it a save copies, and what was copied is not written."""
    writer, goes_on = group.workers[0].engine.writer, threading.Event()
    write = writer._write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_write", lambda *given: goes_on.wait(60) and write(*given))
        yield
    goes_on.set()


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Within it this process writes no file that is larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("offload", [False, True])
def test_steps_while_a_checkpoint_is_written_do_not_change_it(offload: bool, tmp_path: Path):
    config = policy_config(write_model(tmp_path / "model"), fsdp={"optimizer_offload": offload})
    group, loaded, data = (
        local_group(ActorWorker, config),
        local_group(ActorWorker, config),
        make_batch(),
    )
    engine, memory = group.workers[0].engine, set()
    for path in (tmp_path / "first", tmp_path / "second"):
        group.update_actor(data).get()
        expected = {name: tensor.clone() for name, tensor in engine._state().items()}
        with writing_is_held_up(group):
            group.save_checkpoint(str(path), wait=False)
            group.update_actor(data).get()
            assert group.save_result(wait=False).get() == [None] and not list(
                path.glob("*.safetensors")
            )
        (files,) = group.save_result(wait=True).get()
        assert [*files] == [file.name for file in path.glob("*.safetensors")]
        for name, digest in files.items():
            assert digest["sha256"] == hashlib.sha256((path / name).read_bytes()).hexdigest()
        loaded.load_checkpoint(str(path))
        found = loaded.workers[0].engine._state()
        assert found.keys() == expected.keys() and any(name.endswith("exp_avg") for name in found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        memory |= {buffer.data_ptr() for buffer in engine.writer.buffers.values()}
    assert not torch.equal(found["training_steps"], engine._state()["training_steps"])
    assert len(memory) == len(expected)  # both saves copied to the same memory


def test_a_copy_that_is_being_written_is_not_written_over(tmp_path: Path):
    group = actor_group(tmp_path / "model")
    with writing_is_held_up(group):
        group.save_checkpoint(str(tmp_path / "first"), wait=False)
        with pytest.raises(WorkerError, match="a copy that is being written lies in the buffers"):
            group.save_checkpoint(str(tmp_path / "second"), wait=False)
    group.save_result(wait=True).get()
    group.save_checkpoint(str(tmp_path / "second"))


@pytest.mark.parametrize("num_tensors", [0, 1, 2, 3])
def test_a_rank_that_has_no_tensor_or_one_writes_its_file(num_tensors: int, tmp_path: Path):
    mesh = actor_group(tmp_path / "model").workers[0].engine.mesh
    state = {f"tensor {index}": torch.full((2, 3), float(index)) for index in range(num_tensors)}
    writer = ShardWriter(0, mesh)
    threads: list[str] = []
    writer.begin(state, tmp_path / "saved", lambda: threads.append(threading.current_thread().name))
    assert writer.result(wait=True).keys() == {"rank_00000.safetensors"}
    # As a listing of the threads shows it
    assert len(threads) == 1 and threads[0].startswith("checkpoint_")
    written = load_file(tmp_path / "saved/rank_00000.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }


def test_the_settings_that_a_thread_writes_leave_the_model_as_it_is(tmp_path: Path):
    engine = actor_group(tmp_path / "model").workers[0].engine
    before = engine.model.hf.config.to_dict()
    save_settings(engine.model.hf, engine.tokenizer, torch.bfloat16, str(tmp_path / "written"))
    assert json.loads((tmp_path / "written/config.json").read_text())["dtype"] == "bfloat16"
    assert (
        engine.model.hf.config.to_dict() == before and engine.model.hf.config.dtype == torch.float32
    )


def test_settings_of_which_some_are_in_folders_are_written_where_they_were(tmp_path: Path):
    group = actor_group(tmp_path / "base")
    tokenizer = group.workers[0].engine.tokenizer
    # The second in a folder
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    group.save_checkpoint(str(tmp_path / "saved"))
    assert (
        tmp_path / "saved/additional_chat_templates/tool_use.jinja"
    ).read_text() == "{{ tools }}"


def test_a_file_that_cannot_be_written_is_named_and_removed_and_the_next_save_writes_it(
    tmp_path: Path,
):
    group = actor_group(tmp_path / "model")
    before = parameters_of(group.workers[0])
    with files_of_at_most(10_000):
        group.save_checkpoint(str(tmp_path / "checkpoint"), wait=False)
        for wait in (True, False):
            message = (
                "worker rank 0 .* failed in save_result: OSError: "
                ".*/checkpoint/rank_00000.safetensors cannot be"
            )
            with pytest.raises(WorkerError, match=message):
                group.save_result(wait=wait).get()
    assert not list((tmp_path / "checkpoint").glob("*.safetensors"))
    group.save_checkpoint(str(tmp_path / "checkpoint"))
    group.update_actor(make_batch()).get()
    group.load_checkpoint(str(tmp_path / "checkpoint"))
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in parameters_of(group.workers[0]).items()
    )


def test_a_checkpoint_of_another_model_is_refused_by_the_first_tensor_that_does_not_fit(
    tmp_path: Path,
):
    actor_group(tmp_path / "model", tie=True).save_checkpoint(str(tmp_path / "checkpoint"))
    other = actor_group(tmp_path / "other")
    with pytest.raises(
        WorkerError,
        match=r"another model: model\.lm_head\.weight is None there, and \[\d+, 32\] here",
    ):
        other.load_checkpoint(str(tmp_path / "checkpoint"))


def test_a_checkpoint_with_a_further_tensor_is_of_another_model(tmp_path: Path):
    actor_group(tmp_path / "model").save_checkpoint(str(tmp_path / "checkpoint"))
    other = actor_group(tmp_path / "other", tie=True)
    with pytest.raises(
        WorkerError, match=r"model\.lm_head\.weight is \[\d+, 32\] there, and None here"
    ):
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
