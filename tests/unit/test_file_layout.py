"""Where the tensors of a checkpoint's files lie in a model's: views of whole tensors and of
shards."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import tiny_config
from transformers import AutoModelForCausalLM, MixtralConfig

from verl_like.workers.models.lora import model_buffers
from verl_like.workers.weights.direct import gather
from verl_like.workers.weights.exports import collect_weights, in_order, iterate_weights
from verl_like.workers.weights.file_layout import FileTensor, file_layout, files_in
from verl_like.workers.weights.fingerprints import fingerprint_tensor

STACKED = (4, 3, 5)
"""The shape of a tensor in memory, of 4 experts."""
SECOND_HALF = FileTensor("2.up", (2, 5), (5, 1), offset=2 * 15 + 5, shape_in_memory=STACKED)
"""The last two rows of expert 2."""
TURNED = FileTensor("turned", (4, 5, 3), (15, 1, 5), offset=0, shape_in_memory=STACKED)
"""All experts transposed."""


def stacked() -> torch.Tensor:
    return torch.arange(60.0).view(STACKED)


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "qwen2_moe", "granitemoe", "phimoe", "glm4_moe", "gpt2"]
)
def test_weights_travel_as_transformers_saves_them(family: str, tmp_path: Path):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    export = collect_weights(
        model.named_parameters(),
        model_buffers(model),
        layout=file_layout(model),
        dtype=torch.float32,
        rank=0,
        world_size=1,
        version=2,
        bucket_bytes=1 << 12,
    )
    sent = dict(iterate_weights([export]))
    assert sent.keys() == saved.keys()
    for name, values in saved.items():
        assert torch.equal(sent[name], values), name
        assert export.fingerprints[name] == fingerprint_tensor(values), name
    assert export.num_tensors == len(saved)


def test_direct_transports_send_tensors_of_files_in_the_order_of_the_announced_ones():
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    layout = file_layout(model)
    (announced,) = [
        collect_weights(
            model.named_parameters(),
            layout=layout,
            dtype=torch.bfloat16,
            rank=0,
            world_size=1,
            version=1,
        )
    ]
    sent = list(gather(in_order(model.named_parameters(), torch.bfloat16, [], layout)))
    expected = list(iterate_weights([announced]))
    assert [name for name, _ in sent] == [name for name, _ in expected]
    assert all(tensor.is_contiguous() for _, tensor in sent)
    assert all(torch.equal(got[1], whole[1]) for got, whole in zip(sent, expected, strict=True))


def test_an_expert_of_mixtral_is_rows_of_the_stacked_tensor():
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "vocab_size": 10}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads))
    stacked_name = "model.layers.0.mlp.experts.gate_up_proj"
    files = {file.name: file for file in file_layout(model)[stacked_name]}
    whole = torch.arange(3 * 12 * 8.0).view(3, 12, 8)
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert torch.equal(files[f"{prefix}.2.w1.weight"].of(whole), whole[2, :6])
    assert torch.equal(files[f"{prefix}.1.w3.weight"].of(whole), whole[1, 6:])


def test_a_model_that_was_loaded_has_the_layout_of_one_that_was_not(tmp_path: Path):
    config = tiny_config("mixtral")
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert file_layout(loaded) == file_layout(made)
    assert hasattr(loaded, "_weight_conversions")  # what saving it needs


def test_the_layout_of_a_model_that_no_machine_holds_takes_no_memory():
    """Its largest parameter has four terabytes."""
    config = MixtralConfig(
        hidden_size=1 << 20,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_local_experts=2,
        vocab_size=8,
    )
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    names = {file.name for files in file_layout(hf).values() for file in files}
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in names


def test_what_the_layout_does_not_name_is_in_files_as_in_memory():
    (file,) = files_in({}, "heads.value.weight", torch.ones(2, 3))
    assert (file.name, file.shape, file.is_whole) == ("heads.value.weight", (2, 3), True)


def test_a_view_starts_where_the_tensor_does_in_its_own_memory():
    memory = torch.arange(70.0)
    whole = memory[10:].view(STACKED)
    assert torch.equal(SECOND_HALF.of(whole), whole[2, 1:])
    assert torch.equal(TURNED.of(whole), whole.transpose(1, 2))


@pytest.mark.parametrize(("first", "num_rows"), [(0, 3), (2, 2), (1, 2)])
def test_a_tensor_in_one_row_is_whole_on_the_rank_that_has_the_row(first: int, num_rows: int):
    whole = stacked()
    part = SECOND_HALF.of_rows(whole[first : first + num_rows], first)
    assert part is not None and part.first_row == 0
    assert torch.equal(part.values, whole[2, 1:])


@pytest.mark.parametrize(("first", "num_rows"), [(0, 2), (3, 1), (4, 0)])
def test_a_rank_without_the_row_has_no_part(first: int, num_rows: int):
    assert SECOND_HALF.of_rows(stacked()[first : first + num_rows], first) is None


def test_a_tensor_of_whole_rows_is_cut_where_they_are():
    whole = stacked()
    part = TURNED.of_rows(whole[1:3], 1)
    assert part is not None and part.first_row == 1
    assert torch.equal(part.values, whole[1:3].transpose(1, 2))
    last_two = FileTensor("last", (2, 3), (15, 5), offset=2 * 15 + 4, shape_in_memory=STACKED)
    beginning = last_two.of_rows(whole[1:3], 1)
    end = last_two.of_rows(whole[3:], 3)
    assert beginning is not None and end is not None
    assert (beginning.first_row, end.first_row) == (0, 1)
    assert torch.equal(beginning.values, whole[2:3, :, 4])
    assert torch.equal(end.values, whole[3:, :, 4])
    assert last_two.of_rows(whole[:2], 0) is None


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((5, 4), (1, 15)),  # columns before rows
        ((2, 3, 5), (30, 5, 1)),  # every second row
        ((2, 20), (20, 1)),  # across the ends of rows
    ],
)
def test_a_tensor_that_cannot_be_cut_where_the_rows_are_is_refused(
    shape: tuple[int, ...], stride: tuple[int, ...]
):
    odd = FileTensor("odd", shape, stride, offset=0, shape_in_memory=STACKED)
    with pytest.raises(ValueError, match=r"odd of the model's files .* train with strategy=ddp"):
        odd.of_rows(stacked()[:2], 0)
