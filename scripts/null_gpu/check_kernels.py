"""Whether numbers on the null GPU are those of the CPU: run by `make gpu-rehearsal` in a process
that has one."""

import copy

import torch
import torch.nn.functional as F
import vllm._custom_ops as vllm_ops
from torch.nn.attention.varlen import varlen_attn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink
from vllm.model_executor.layers.fused_moe import fused_experts, fused_topk


def a_network_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    here = torch.nn.Sequential(
        torch.nn.Linear(7, 9), torch.nn.LayerNorm(9), torch.nn.GELU(), torch.nn.Linear(9, 4)
    )
    there = copy.deepcopy(here).cuda()
    inputs = torch.randn(5, 7)
    labels = torch.arange(5) % 4
    for model, device in ((here, "cpu"), (there, "cuda")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for own, other in zip(here.parameters(), there.parameters(), strict=True):
        assert other.is_cuda
        torch.testing.assert_close(other.cpu(), own)


def attention_over_packed_sequences_is_dense_attention_of_each() -> None:
    torch.manual_seed(0)
    shapes = ((10, 4, 8), (10, 2, 8), (10, 2, 8))
    packed = [
        torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for shape in shapes
    ]
    starts = torch.tensor([0, 4, 10], dtype=torch.int32, device="cuda")
    out = varlen_attn(*packed, starts, starts, 6, 6, window_size=(-1, 0), enable_gqa=True)
    grad = torch.randn(10, 4, 8, dtype=torch.bfloat16)
    out.backward(grad.cuda())
    plain = [tensor.detach().cpu().float().requires_grad_() for tensor in packed]
    parts = [
        [tensor[rows].transpose(0, 1) for tensor in plain] for rows in (slice(0, 4), slice(4, 10))
    ]
    dense = [
        F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True).transpose(0, 1)
        for part in parts
    ]
    torch.cat(dense).backward(grad.float())
    torch.testing.assert_close(out.cpu().float(), torch.cat(dense), atol=2e-2, rtol=2e-2)
    for own, other in zip(packed, plain, strict=True):
        torch.testing.assert_close(own.grad.cpu().float(), other.grad, atol=2e-2, rtol=2e-2)


def random_numbers_follow_the_seed_and_the_state() -> None:
    torch.cuda.manual_seed(1)
    first = torch.rand(8, device="cuda")
    second = torch.rand(8, device="cuda")
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    state = torch.cuda.get_rng_state()
    third = torch.randint(1000, (8,), device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randint(1000, (8,), device="cuda"), third)


def results_lie_on_the_device_and_outputs_are_resized() -> None:
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(3, device="cuda"), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    values, order = torch.tensor([3.0, 1.0], device="cuda").sort()
    assert values.is_cuda and (values.tolist(), order.tolist()) == ([1, 3], [1, 0])
    view = torch.arange(6, device="cuda").view(2, 3)[:, 1:]
    view += 10  # in place, of a part
    assert view._base.flatten().tolist() == [0, 11, 12, 3, 14, 15]


def tensors_on_different_devices_are_refused() -> None:
    try:
        torch.ones(3, device="cuda") + torch.ones(3)
    except RuntimeError as error:
        assert "Expected all tensors to be on the same device" in str(error)
    else:
        raise AssertionError("a CUDA tensor and a CPU tensor were added")
    # A number is no tensor of a device
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).tolist() == [2, 2, 2]


def a_kernel_without_an_answer_is_refused() -> None:
    try:
        torch.fft.fft(torch.ones(4, device="cuda"))
    except RuntimeError:
        return
    raise AssertionError("a Fourier transform ran, which nothing answers")


def the_shards_of_an_embedding_add_up_to_it() -> None:
    """Two ranks: tokens 0 to 2 and added 6, tokens 3 to 5 and added 7, each with a row of padding
    between."""
    rows = torch.arange(1.0, 9).repeat_interleave(2).view(8, 2)
    padding = torch.full((1, 2), 99.0)
    tokens = torch.tensor([5, 0, 6, 3, 7, 2], dtype=torch.int32, device="cuda")
    parts = []
    for first, added in ((0, 6), (3, 7)):
        shard = torch.cat([rows[first : first + 3], padding, rows[added : added + 1]]).cuda()
        parts.append(
            vllm_ops.vocab_parallel_embedding(tokens, shard, first, first + 3, 1, added, added + 1)
        )
    assert torch.equal((parts[0] + parts[1]).cpu(), rows[tokens.long().cpu()])
    assert parts[0][0].tolist() == [0, 0]


def an_adapter_adds_its_product_to_the_tokens_that_have_it() -> None:
    """Two adapters of rank 2 for two slices of three columns; token 1 has none."""
    adapter_of_token = [1, -1, 0, 1]
    meta = LoRAKernelMeta.make(max_loras=2, max_num_tokens=8, device="cuda")
    meta.prepare_tensors(torch.tensor(adapter_of_token, dtype=torch.int32, device="cuda"))
    arguments = meta.meta_args(4, True)
    generator = torch.Generator().manual_seed(3)

    def small_integers(*shape: int) -> torch.Tensor:  # exact in bfloat16, and their products
        return torch.randint(-2, 3, shape, generator=generator).float()

    inputs = small_integers(4, 5)
    before = small_integers(4, 6)
    of_slices = [(small_integers(2, 1, 2, 5), small_integers(2, 1, 3, 2)) for _ in range(2)]
    shrunk = torch.full((2, 4, 2), 7.0, device="cuda")
    weights_a, weights_b = (
        [each.cuda().bfloat16() for each in part] for part in zip(*of_slices, strict=True)
    )
    lora_shrink(inputs.cuda().bfloat16(), weights_a, shrunk, *arguments, 0.5)
    out = before.cuda().bfloat16()
    lora_expand(shrunk, weights_b, out, *arguments, add_inputs=True)
    for token, adapter in enumerate(adapter_of_token):
        products = [0.5 * b[adapter, 0] @ (a[adapter, 0] @ inputs[token]) for a, b in of_slices]
        added = torch.cat(products) if adapter >= 0 else torch.zeros(6)
        assert torch.equal(out[token].float().cpu(), before[token] + added)


def tokens_are_computed_by_their_experts() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(5, 64, dtype=torch.bfloat16)
    to_gate_and_up = 0.1 * torch.randn(8, 2 * 32, 64, dtype=torch.bfloat16)
    back = 0.1 * torch.randn(8, 64, 32, dtype=torch.bfloat16)
    logits = torch.randn(5, 8)
    weights, ids, *_ = fused_topk(tokens.cuda(), logits.cuda(), 2, True)
    chosen = logits.softmax(-1).topk(2)
    assert torch.equal(ids.cpu().long(), chosen.indices)
    shares = chosen.values / chosen.values.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.cpu(), shares)
    with set_current_vllm_config(VllmConfig()):
        out = fused_experts(tokens.cuda(), to_gate_and_up.cuda(), back.cuda(), weights, ids)
    for token, own_ids, own_shares, own in zip(
        tokens.float(), chosen.indices, shares, out.cpu().float(), strict=True
    ):
        expected = torch.zeros(64)
        for expert, share in zip(own_ids, own_shares, strict=True):
            gate, up = (to_gate_and_up[expert].float() @ token).chunk(2)
            expected += share * (back[expert].float() @ (F.silu(gate) * up))
        torch.testing.assert_close(own, expected, atol=2e-2, rtol=2e-2)


CHECKS = (
    an_adapter_adds_its_product_to_the_tokens_that_have_it,
    the_shards_of_an_embedding_add_up_to_it,
    a_network_trains_as_on_the_cpu,
    attention_over_packed_sequences_is_dense_attention_of_each,
    random_numbers_follow_the_seed_and_the_state,
    results_lie_on_the_device_and_outputs_are_resized,
    tensors_on_different_devices_are_refused,
    a_kernel_without_an_answer_is_refused,
    tokens_are_computed_by_their_experts,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
    print(f"{len(CHECKS)} checks of the kernels hold")
