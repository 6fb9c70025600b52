"""Saved activations in host memory, and compiled layers: the same numbers as without."""

import os
import shutil
from functools import partial

import pytest
import torch
from tiny_worker_models import (
    critic_config,
    gradients_of,
    local_group,
    make_batch,
    policy_config,
    relative_error,
    write_model,
)
from transformers import AutoModelForCausalLM, LlamaForTokenClassification

from verl_like.workers import model_worker
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.engine import activation_offload
from verl_like.workers.engine.activation_offload import ActivationOffload
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.packing import Rows, pack
from verl_like.workers.models.pretrained import compile_layers, load_pretrained
from verl_like.workers.weights.ipc import IpcTransport


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "policy")


def policy(path, *, checkpointing):
    config = policy_config(path)
    hf = load_pretrained(
        AutoModelForCausalLM,
        config.model,
        config.actor.fsdp_config,
        key="m",
        device="cpu",
        weights=True,
    )
    if checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(hf).train()


class Recorder(ActivationOffload):
    """Remembers which tensors stayed and which went."""

    def __init__(self):
        super().__init__()
        self.stayed, self.gone = [], []

    def _save(self, tensor):
        saved = super()._save(tensor)
        (self.stayed if saved is tensor else self.gone).append(tensor.shape)
        return saved


@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_come_back_from_host_memory_as_they_were(
    model_path, monkeypatch, checkpointing
):
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 1)
    packed, results = pack(Rows.of(make_batch())), []
    for saving in (None, Recorder()):
        model = policy(model_path, checkpointing=checkpointing)
        model.saving = saving or model.saving
        (log_probs,) = model(packed, 1.0)
        log_probs.sum().backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(gradient, results[0][name]) for name, gradient in results[1].items())
    layer_input = torch.Size([1, packed.input_ids.size(1), 32])
    assert saving.gone.count(layer_input) >= 2  # of both layers
    weights = {parameter.shape for parameter in model.parameters() if parameter.ndim == 2}
    weights |= {torch.Size(reversed(shape)) for shape in weights}
    assert not weights & set(saving.gone)
    assert checkpointing or weights & set(saving.stayed)


def test_small_tensors_stay_where_they_are(model_path):
    model = policy(model_path, checkpointing=True)
    model.saving = Recorder()
    model(pack(Rows.of(make_batch())), 1.0)
    assert model.saving.stayed and not model.saving.gone


def test_the_copy_of_the_layer_before_is_issued_as_the_backward_pass_needs_a_layer(monkeypatch):
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 1)
    events = []

    class Square(torch.autograd.Function):
        """x^2, which tells when its gradient is computed."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            events.append(f"compute with {x.item():.4g}")
            return 2 * x * grad

    class Issuing(ActivationOffload):
        def _issue(self, saved):
            if saved.fetched is None:
                events.append(f"copy {saved.host.item():.4g}")
            super()._issue(saved)

    offload = Issuing()
    # Of the second pass the first layer has none before it: the pass before is over
    for start in (1.5, 2.0):
        x = torch.tensor([start], requires_grad=True)
        with offload:
            y = Square.apply(Square.apply(Square.apply(x)))
        y.backward()
        assert x.grad.item() == pytest.approx(8 * start**7)
    assert events == [
        *(
            "copy 5.062",
            "copy 2.25",
            "compute with 5.062",
            "copy 1.5",
            "compute with 2.25",
            "compute with 1.5",
        ),
        *("copy 16", "copy 4", "compute with 16", "copy 2", "compute with 4", "compute with 2"),
    ]


def test_an_offloaded_tensor_can_be_fetched_again(monkeypatch):
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 1)
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    with ActivationOffload():
        y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [12, 16]


@pytest.mark.proof
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_have_the_gradient_of_eager_ones(model_path):
    results = []
    for compiled in (False, True):
        config = policy_config(model_path, micro=3)
        one_layer = {"override_config": {"num_hidden_layers": 1}, "use_torch_compile": compiled}
        model = config.model.model_copy(update=one_layer)
        group = local_group(ActorWorker, config.model_copy(update={"model": model}))
        gradients, _ = gradients_of(
            group.workers[0], lambda group=group: group.update_actor(make_batch()).get()
        )
        results.append(gradients)
    assert relative_error(results[1], results[0]) < 2e-6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_layers_are_not_compiled_again_for_every_number_of_sequences(model_path, monkeypatch):
    # Graphs without a C++ compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    model = policy(model_path, checkpointing=False)
    compile_layers(model.hf)
    graphs = torch._dynamo.utils.counters["stats"]
    before, sizes = graphs["unique_graphs"], range(3, 13)
    for rows in sizes:
        model(pack(Rows.of(make_batch(rows))), 1.0)
    assert 0 < graphs["unique_graphs"] - before < len(sizes)


@pytest.mark.parametrize("shares_device", [True, False])
def test_cached_memory_is_handed_back_only_where_an_engine_shares_the_device(
    model_path, monkeypatch, shares_device
):
    config = policy_config(model_path)
    group = local_group(ActorWorker, config, shares_device=shares_device)
    engine, calls = group.workers[0].engine, []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    engine.device = "cuda"
    engine._offload()
    assert len(calls) == shares_device


@pytest.mark.parametrize(
    "switch", ["enable_gradient_checkpointing", "enable_activation_offload", "use_torch_compile"]
)
def test_actor_and_critic_do_what_each_switch_says_and_nothing_else(tmp_path, model_path, switch):
    switches = dict.fromkeys(
        ("enable_gradient_checkpointing", "enable_activation_offload", "use_torch_compile"), False
    )
    value_path = write_model(tmp_path / "critic", LlamaForTokenClassification)
    made = [
        (ActorWorker, policy_config(model_path), {}),
        (CriticWorker, critic_config(value_path), {"seed": 1}),
    ]
    for worker_class, config, arguments in made:
        model = config.model.model_copy(update=switches | {switch: True})
        group = local_group(worker_class, config.model_copy(update={"model": model}), **arguments)
        engine = group.workers[0].engine
        assert engine.model.hf.is_gradient_checkpointing == (
            switch == "enable_gradient_checkpointing"
        )
        compiled = ["forward" in vars(layer) for layer in engine.units[:-1]]
        assert compiled == [switch == "use_torch_compile"] * 2


def test_segments_of_memory_grow_on_a_gpu_unless_another_process_opens_them(
    monkeypatch: pytest.MonkeyPatch,
):
    def stop(*_: object) -> None:
        raise InterruptedError("before anything needs a GPU")

    monkeypatch.setattr(model_worker, "init_process_group", stop)
    setting = "PYTORCH_CUDA_ALLOC_CONF"
    for device, transport, expected in (
        ("cuda", None, "expandable_segments:True"),
        ("cuda", IpcTransport(), None),
        ("cpu", None, None),
    ):
        monkeypatch.setenv("VERL_LIKE_DEVICE", device)
        monkeypatch.setenv(setting, "")
        monkeypatch.delenv(setting)
        worker = model_worker.ModelWorker()
        worker.weight_transport = transport
        with pytest.raises(InterruptedError):
            worker.start_engine()
        assert os.environ.pop(setting, None) == expected, (device, transport)
    monkeypatch.setenv("VERL_LIKE_DEVICE", "cuda")
    monkeypatch.setenv(setting, "max_split_size_mb:64")
    with pytest.raises(InterruptedError):
        model_worker.ModelWorker().start_engine()
    assert os.environ[setting] == "max_split_size_mb:64"  # what the user says
