"""The average of the actor's weights: its numbers, its checkpoint, its export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_worker_models import local_group, make_batch, parameters_of, policy_config, write_model

from verl_like.export import export
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.workers.actor import ActorWorker


def averages_of(group: LocalWorkerGroup) -> dict[str, torch.Tensor]:
    engine = group.workers[0].engine
    return {
        name: engine.optimizer.state[p]["ema"].full_tensor().clone()
        for name, p in engine.named_parameters()
    }


def actor_group(path: str, **settings) -> LocalWorkerGroup:
    return local_group(ActorWorker, policy_config(path, ema_decay=0.75, **settings))


@pytest.mark.parametrize(
    "fsdp", [{}, {"model_dtype": "bfloat16", "optimizer_offload": True, "param_offload": True}]
)
def test_the_average_moves_by_a_quarter_of_the_way_in_each_optimizer_step_but_not_in_one_that_is_skipped(
    tmp_path: Path, fsdp: dict
):
    group = actor_group(write_model(tmp_path / "model"), prompts=4, fsdp=fsdp, optim={"lr": 1e-2})
    (worker,), expected, step = (
        group.workers,
        averages_of(group),
        group.workers[0].engine.optimizer.step,
    )
    weights = parameters_of(worker)
    assert all(torch.equal(average, weights[name].float()) for name, average in expected.items())

    def step_and_average() -> None:
        step()
        for name, weight in parameters_of(worker).items():
            expected[name] = 0.75 * expected[name] + 0.25 * weight.float()

    worker.engine.optimizer.step = step_and_average
    group.update_actor(make_batch()).get()  # two optimizer steps
    overflowing = make_batch()
    overflowing.batch["advantages"] = overflowing.batch["advantages"] * torch.inf
    group.update_actor(overflowing).get()
    found = averages_of(group)
    for name, average in found.items():
        assert average.dtype == torch.float32 and not torch.equal(
            average, parameters_of(worker)[name].float()
        )
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-7)


def test_a_restored_average_goes_on_bit_for_bit_and_is_exported(tmp_path: Path):
    path = write_model(tmp_path / "model")
    whole, restored = actor_group(path), actor_group(path)
    whole.update_actor(make_batch()).get()
    whole.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    restored.load_checkpoint(str(tmp_path / "actor/checkpoint"))
    saved = averages_of(whole)
    export(tmp_path / "actor", tmp_path / "averaged", ema=True)
    exported = load_file(tmp_path / "averaged/model.safetensors")
    assert exported.keys() == saved.keys() and all(
        torch.equal(exported[name], saved[name]) for name in saved
    )
    for group in (whole, restored):
        group.update_actor(make_batch(seed=1)).get()
    expected, found = averages_of(whole), averages_of(restored)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(torch.equal(saved[name], expected[name]) for name in expected)


def test_the_average_of_an_adapter_is_exported_in_the_merged_model(tmp_path: Path):
    path = write_model(tmp_path / "model")
    config = policy_config(path, ema_decay=0.75)
    adapter = {"lora_rank": 3, "lora_alpha": 6, "target_modules": ("q_proj",)}
    model = config.model.model_copy(update=adapter)
    group = local_group(ActorWorker, config.model_copy(update={"model": model}))
    group.update_actor(make_batch()).get()
    group.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    export(tmp_path / "actor", tmp_path / "averaged", ema=True)
    name = "model.layers.0.self_attn.q_proj"
    averages = averages_of(group)
    a, b = (averages[f"{name}.lora_{matrix}.default.weight"] for matrix in "AB")
    base = load_file(f"{path}/model.safetensors")[f"{name}.weight"]
    found = load_file(tmp_path / "averaged/model.safetensors")[f"{name}.weight"]
    torch.testing.assert_close(found, base + 6 / 3 * b @ a, rtol=1e-6, atol=1e-7)
    now = parameters_of(group.workers[0])[f"{name}.lora_B.default.weight"]
    assert not torch.allclose(now, b)


def test_there_is_no_average_without_a_decay(tmp_path: Path):
    group = local_group(ActorWorker, policy_config(write_model(tmp_path / "model")))
    group.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    with pytest.raises(
        ValueError,
        match=r"no average of the weights: train with actor_rollout_ref\.actor\.ema_decay",
    ):
        export(tmp_path / "actor", tmp_path / "averaged", ema=True)
    assert not (tmp_path / "averaged").exists()
    with pytest.raises(WorkerError, match="checkpoint of another model: optimizer"):
        actor_group(str(tmp_path / "model")).load_checkpoint(str(tmp_path / "actor/checkpoint"))
