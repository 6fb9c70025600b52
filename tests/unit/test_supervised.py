"""Fine-tuning on conversations: which tokens are learned, and the loss against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_experts import write_experts
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_like.data.conversations import ConversationDataset
from verl_like.protocol import metric_values
from verl_like.protocol.padded import padded
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.supervised import SFTConfig, broken_supervised_rules
from verl_like.trainer.run.console import RunConsole
from verl_like.trainer.run.report import write_report
from verl_like.trainer.supervised.display import display_of
from verl_like.trainer.supervised.run_supervised import (
    KINDS,
    Kind,
    check_balance,
    check_inputs,
    pool_of,
    worker_arguments,
)
from verl_like.trainer.supervised.trainer import SupervisedTrainer
from verl_like.workers.supervised import SFTWorker

TEMPLATE = (
    "{% for m in messages %}{{ '+' if m['role'] == 'user' else '-' }}{{ m['content'] }}"
    "{{ '<eos>' if m['role'] == 'assistant' }}{% endfor %}{% if add_generation_prompt %}-{% endif "
    "%}"
)
CHAT = [("user", "ab"), ("assistant", "cde"), ("user", "f"), ("assistant", "g")]


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module")
def model_path(tiny_llama: Callable) -> str:
    """A model whose template marks the turns."""
    return tiny_llama(template=TEMPLATE)[0]


def loader(
    dataset_class: type[ConversationDataset], model_path: str, folder: Path
) -> Callable[..., Any]:
    """A function that makes a dataset of rows, with the model's tokenizer."""

    def load(*rows: Any, **settings: Any) -> ConversationDataset:
        files = [write_rows(folder / "rows.jsonl", list(rows))]
        return dataset_class(
            files, AutoTokenizer.from_pretrained(model_path), **{"max_length": 30, **settings}
        )

    return load


@pytest.fixture
def load(model_path: str, tmp_path: Path) -> Callable[..., ConversationDataset]:
    return loader(ConversationDataset, model_path, tmp_path)


def learned_text(dataset: ConversationDataset, row: int, model_path: str) -> str:
    """The conversation, with what is not learned as dots."""
    batch = padded(dataset.collate([row])).tensors()
    tokens = AutoTokenizer.from_pretrained(model_path).convert_ids_to_tokens(
        batch["input_ids"][0].tolist()
    )
    mask = [0, *batch["response_mask"][0].tolist()]
    return "".join(token if learned else "." for token, learned in zip(tokens, mask, strict=True))


def test_what_assistants_write_is_learned_with_the_end_of_their_turns(
    load: Callable, model_path: str
):
    dataset = load(
        {"messages": messages(*CHAT)},
        {"prompt": "ab", "response": "cd"},
        {"prompt": messages(("user", "ab")), "completion": messages(("assistant", "c"))},
    )
    #                                                        +ab-cde<eos>+f-g<eos>
    assert learned_text(dataset, 0, model_path) == "....cde<eos>...g<eos>"
    assert learned_text(dataset, 1, model_path) == "....cd<eos>"
    assert learned_text(dataset, 2, model_path) == "....c<eos>"


def test_a_text_is_learned_with_an_end_of_sequence_token_which_it_gets_once(
    load: Callable, model_path: str
):
    dataset = load(
        {"text": "abc"},
        {"text": "abc<eos>"},
        {"text": "ab<eos>c"},
        {"text": "abcdef"},
        max_length=7,
    )
    texts = [learned_text(dataset, row, model_path) for row in range(4)]
    assert texts == [".bc<eos>", ".bc<eos>", ".b<eos>c<eos>", ".bcdef<eos>"]
    assert dataset.longest[0] == 7 and dataset.learns_to_end
    cut = load({"text": "abcdef"}, max_length=6, overlong="truncate")
    assert learned_text(cut, 0, model_path) == ".bcdef" and not cut.learns_to_end
    both = load({"text": "abc"}, {"text": "abcdef"}, max_length=6, overlong="truncate")
    assert learned_text(both, 1, model_path) == ".bcdef" and both.learns_to_end


def test_a_text_without_an_end_of_sequence_token_to_add_is_refused(model_path: str, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.eos_token = None
    with pytest.raises(
        ValueError,
        match=r"rows.jsonl, row 0: field 'text' ends with an end-of-sequence token, which",
    ):
        ConversationDataset(
            [write_rows(tmp_path / "rows.jsonl", [{"text": "ab"}])], tokenizer, max_length=9
        )


def test_a_run_warns_of_a_template_that_writes_no_end_behind_answers(
    model_path: str, tiny_llama: Callable, tmp_path
):
    endless = tiny_llama(
        template=TEMPLATE.replace("{{ '<eos>' if m['role'] == 'assistant' }}", "")
    )[0]
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "response": "cde"}])
    warned = {}
    for path in (model_path, endless):
        notes = check_inputs(config_of(path, file, "data.train_batch_size=1"), None).notes
        warned[path] = [note for note in notes if "does not learn to end" in note]
    assert [len(notes) for notes in warned.values()] == [0, 1]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{"story": "ab"}],
            {},
            r"rows.jsonl, row 0: field 'prompt' is missing, .* the row has story",
        ),
        (
            [{"messages": [{"role": "user"}]}],
            {},
            r"row 0: field messages\[0\]\['content'\] is missing",
        ),
        ([{"messages": messages(("user", "ab"))}], {}, "row 0: none of the 3 tokens is learned"),
        ([{"prompt": "a" * 30, "response": "c"}], {}, "34 tokens, more than data.max_length=30"),
        (
            [{"prompt": "a" * 30, "response": "c"}],
            {"overlong": "truncate"},
            "none of the 30 tokens .* among its first 30 tokens",
        ),
        (
            [{"prompt": "a" * 30, "response": "c"}],
            {"overlong": "drop"},
            r"no conversation .* \(1 are too long\)",
        ),
    ],
)
def test_rows_that_cannot_be_learned_are_named(
    load: Callable, rows: list, settings: dict, message: str
):
    with pytest.raises(ValueError, match=message):
        load(*rows, **settings)


def test_a_tokenizer_without_a_token_to_pad_with_is_refused(model_path: str, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a padding nor an end-of-sequence token"):
        ConversationDataset(
            [write_rows(tmp_path / "rows.jsonl", [{"text": "ab"}])], tokenizer, max_length=9
        )


def config_of(model_path: str, file: str, *settings: str) -> SFTConfig:
    own = [
        f"data.train_files={file}",
        f"model.path={model_path}",
        "trainer.device=cpu",
        "training.optim.lr=1e-2",
    ]
    return load_config(
        SFTConfig, broken_supervised_rules, [*own, "trainer.total_training_steps=3", *settings]
    )


def test_the_start_says_how_experts_are_balanced_and_refuses_a_weight_that_is_of_no_use(
    model_path: str, tmp_path: Path
):
    experts = write_experts(tmp_path, "mixtral")
    key = "training.router_aux_loss_coef"

    def notes(path: str, own: float, *settings: str) -> list[str]:
        return check_balance(config_of(path, "unused", *settings), own)

    assert notes(experts, 0.02) == [f"{key}=0.02, of the model's configuration"]
    assert notes(experts, 0.02, f"{key}=0") == notes(experts, 0.02, f"{key}=0.3") == []
    lora = notes(experts, 0.02, "model.lora_rank=4")
    assert lora == [f"{key}=0: an adapter leaves the routers as they are"]
    compiled = notes(experts, 0.02, "model.use_torch_compile=true")
    assert compiled == [f"{key}=0: compiled layers do not tell what routers select"]
    (unknown,) = notes(model_path, 0.02)
    assert unknown.startswith(f"{key}=0: ") and "has no experts" in unknown
    assert notes(model_path, 0.0) == []
    with pytest.raises(ValueError, match=rf"{key}=0.3 with model.path=.* has no experts.*{key}=0$"):
        notes(model_path, 0.0, f"{key}=0.3")
    for setting in ("model.lora_rank=4", "model.use_torch_compile=true"):
        with pytest.raises(ValueError, match=rf"{key}=0.3 .* set {setting.split('=')[0]}="):
            notes(experts, 0.02, f"{key}=0.3", setting)


@pytest.mark.parametrize(
    "micro",
    [
        ["training.use_dynamic_bsz=false", "training.micro_batch_size_per_gpu=1"],
        ["model.lora_rank=4"],
    ],
)
def test_the_loss_is_the_mean_over_the_learned_tokens_of_the_batch(
    micro: list[str], load: Callable, model_path: str, tmp_path: Path
):
    dataset = load({"messages": messages(*CHAT)}, {"prompt": "ab", "response": "cdefghi"})
    config = config_of(model_path, "unused", "data.train_batch_size=2", *micro)
    worker = RayClassWithInitArgs(SFTWorker, *worker_arguments(config))
    group = LocalWorkerGroup(worker, 1, role="model")
    group.init_model()
    batch = dataset.collate([0, 1])
    columns, model = (
        padded(batch).tensors(),
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64),
    )
    with torch.no_grad():
        logits = model(
            input_ids=columns["input_ids"], attention_mask=columns["attention_mask"]
        ).logits[:, :-1]
    expected_BR = (
        logits.log_softmax(-1).gather(-1, columns["input_ids"][:, 1:, None])[..., 0]
        * columns["response_mask"]
    )
    for row in range(2):
        alone = metric_values(group.evaluate(dataset.collate([row])).get().meta_info["metrics"])
        mean = -expected_BR[row].sum() / columns["response_mask"][row].sum()
        assert alone == {"loss": pytest.approx(mean.item(), rel=1e-5)}
    losses = [metric_values(group.update_model(batch).get().meta_info["metrics"]) for _ in range(3)]
    assert losses[0]["sft/loss"] == pytest.approx(
        (-expected_BR.sum() / columns["response_mask"].sum()).item(), rel=1e-5
    )
    assert losses[0]["sft/num_tokens"] == 4 + 2 + 8
    assert losses[2]["sft/loss"] < losses[1]["sft/loss"] < losses[0]["sft/loss"]


class UnpaddedWorker(SFTWorker):
    """A user's subclass that returns the losses of tokens without padding, as a model does."""

    def losses(self, micro):
        packed = self.engine.pack(micro.on_host)
        return -packed.of_tokens(self.engine.run(packed, 1.0)[0]), {}


def test_losses_of_a_subclass_that_are_neither_of_rows_nor_of_tokens_are_refused(
    load: Callable, model_path: str
):
    dataset = load({"text": "abcd"}, {"text": "ab"})
    config = config_of(
        model_path, "unused", "data.train_batch_size=2", "training.micro_batch_size_per_gpu=2"
    )
    group = LocalWorkerGroup(
        RayClassWithInitArgs(UnpaddedWorker, *worker_arguments(config)), role="model"
    )
    group.init_model()
    message = (
        r"UnpaddedWorker.losses returned the shape \(\d+,\): give one for each token, \(2, "
        r"\d+\), to which micro"
    )
    with pytest.raises(WorkerError, match=message):
        group.update_model(dataset.collate([0, 1])).get()


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_of_an_epoch_come_in_random_order_or_as_they_are(
    shuffle: bool, load: Callable, model_path: str
):
    rows = "abcdefgh"
    dataset, order = load(*({"text": letter} for letter in rows)), []
    settings = [f"data.shuffle={shuffle}", "data.train_batch_size=1", "trainer.seed=3"]
    trainer = SupervisedTrainer(
        config_of(model_path, "unused", *settings), dataset, None, None, None
    )
    for trainer.global_step in range(1, 17):
        (taken,) = trainer.take()
        order.append(int(taken.batch.tensors()["prompts"][0]))
        assert taken.metrics["training/epoch"].value == (trainer.global_step - 1) // 8
    in_file = [int(dataset.collate([row]).tensors()["prompts"][0]) for row in range(8)]
    assert sorted(order[:8]) == sorted(order[8:]) == sorted(in_file)
    permutations = [
        np.random.RandomState([3, epoch]).permutation(8) if shuffle else range(8)
        for epoch in (0, 1)
    ]
    assert order == [in_file[row] for epoch in permutations for row in epoch]


def test_training_and_validation_rows_have_a_limit_each(model_path: str, tmp_path: Path):
    rows = [{"prompt": "ab", "response": letter} for letter in "cdefgh"]
    train, val = (write_rows(tmp_path / f"{name}.jsonl", rows) for name in ("train", "val"))
    for limits, lengths in (((2, -1), [2, 6]), ((-1, 3), [6, 3]), ((5, 1), [5, 1])):
        settings = [f"data.val_files={val}", "data.train_batch_size=1"]
        settings += [f"data.train_max_samples={limits[0]}", f"data.val_max_samples={limits[1]}"]
        inputs = check_inputs(config_of(model_path, train, *settings), None)
        assert [len(inputs.train_dataset), len(inputs.val_dataset)] == lengths


def test_a_run_has_a_process_for_each_device_of_each_node(model_path: str):
    config = config_of(
        model_path,
        "unused",
        "trainer.nnodes=3",
        "trainer.n_gpus_per_node=2",
        "data.train_batch_size=6",
    )
    pool = pool_of(config)
    assert (
        pool.process_on_nodes == [2, 2, 2] and config.num_processes_of_run == pool.world_size == 6
    )
    assert not pool.use_gpu and pool_of(config.updated({"trainer.device": "cuda"})).use_gpu


def test_ranks_that_do_not_divide_into_groups_are_refused_and_rows_need_not_divide(model_path: str):
    config_of(model_path, "x", "data.train_batch_size=5", "trainer.n_gpus_per_node=2")
    with pytest.raises(
        ValueError, match=r"ulysses_sequence_parallel_size=3 does not divide the 2 ranks"
    ):
        config_of(
            model_path,
            "x",
            "trainer.n_gpus_per_node=2",
            "training.ulysses_sequence_parallel_size=3",
        )


def test_experts_are_distributed_among_the_ranks_of_a_trainer_on_examples(model_path: str):
    distributed = "model.fsdp_config.expert_parallel_size"
    on_ranks = "trainer.n_gpus_per_node=2"
    config = config_of(model_path, "x", on_ranks, f"{distributed}=2")
    with pytest.raises(ValueError, match=r"expert_parallel_size=2: Llama.* has no experts that tr"):
        check_inputs(config, None)
    with pytest.raises(ValueError, match=rf"{distributed}=3 does not divide the 2 processes"):
        config_of(model_path, "x", on_ranks, f"{distributed}=3")


def test_an_unsharded_model_of_several_ranks_is_refused(model_path: str):
    single = "model.fsdp_config.strategy=single"
    with pytest.raises(
        ValueError, match="strategy=single is for one process, and the run has 3 ranks; set ddp"
    ):
        config_of(model_path, "x", single, "trainer.n_gpus_per_node=3", "data.train_batch_size=6")
    assert config_of(model_path, "x", single).model.fsdp_config.strategy == "single"


def test_a_run_says_how_many_rows_it_has_and_how_many_were_too_long(
    model_path: str, tmp_path: Path
):
    rows = [{"prompt": "ab", "response": "c" * length} for length in (1, 2, 30, 3)]
    train, val = (
        write_rows(tmp_path / f"{name}.jsonl", rows[:3] + rows) for name in ("train", "val")
    )
    settings = [
        f"data.val_files={val}",
        "data.val_max_samples=2",
        "data.max_length=20",
        "data.train_batch_size=1",
    ]
    for overlong, note in (
        ("drop", "5 training conversations (2 too long and left out, 0 cut)"),
        ("truncate", "7 training conversations (0 too long and left out, 2 cut)"),
    ):
        inputs = check_inputs(
            config_of(model_path, train, *settings, f"data.overlong={overlong}"), None
        )
        assert inputs.notes == [note, "2 validation conversations"]
    inputs = check_inputs(
        config_of(model_path, train, "data.train_max_samples=2", "data.train_batch_size=1"), None
    )
    assert inputs.notes == ["2 training conversations"]


def test_a_run_none_of_whose_rows_teaches_the_model_to_end_warns(model_path: str, tmp_path: Path):
    rows = [{"prompt": "ab", "response": "c" * 30}] * 2
    train = write_rows(tmp_path / "train.jsonl", rows)
    settings = ["data.max_length=20", "data.overlong=truncate", "data.train_batch_size=1"]
    _, warning = check_inputs(config_of(model_path, train, *settings), None).notes
    assert warning == (
        "Warning: no training row has an end-of-sequence token where it is learned, so the model "
        "does not learn to end: the chat template writes none behind an answer, or rows are cut; "
        "change the template."
    )


def test_a_run_shows_its_loss_in_a_line_and_a_chart_of_each_thing_that_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    metrics = {"loss": 0.125, "accuracy": 0.75, "lr": 2e-5, "grad_norm": 1.5, "margin": 0.5}
    row = {f"dpo/{name}": value for name, value in metrics.items()}
    row |= {
        "step": 3,
        "perf/total_throughput": 1234.0,
        "timing_s/step": 4.0,
        "timing_s/update_model": 3.0,
    }
    display = display_of("dpo", "per pair")
    RunConsole(display, str).show_step(3, 20, row)
    line = " ".join(capsys.readouterr().out.split())
    assert (
        line
        == "step 3/20 loss 0.1250 acc 0.750 lr 2.0e-05 grad 1.50 tok/s 1,234 4.00 s: update_model "
        "3.00"
    )
    empty = {
        "title": "",
        "summary": "",
        "steps": [],
        "placement": [],
        "router_load": [],
        "generations": [],
        "episodes": [],
        "config": "",
    }
    write_report(tmp_path / "report.html", metrics=[row], display=display, **empty)
    said = (tmp_path / "report.html").read_text()
    assert said.count("<svg") == 5
    for title in ("Loss", "Rewards", "Accuracy", "Gradient norm", "Seconds a step"):
        assert f"<!-- {title} -->" in said


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.worker.prefix)
def test_each_kind_of_run_shows_the_metrics_of_its_worker(kind: Kind):
    of_worker = display_of(kind.worker.prefix, "any unit")
    assert kind.display.step_line == of_worker.step_line
    assert [keys for _, keys, _ in kind.display.charts] == [keys for _, keys, _ in of_worker.charts]


def test_a_token_that_the_model_does_not_have_is_refused_with_its_row(
    model_path: str, tmp_path: Path
):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.add_tokens(["##"])
    tokenizer.save_pretrained(tmp_path / "larger")
    rows = [{"prompt": "ab", "response": "cde"}, {"prompt": "ab", "response": "c##"}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    own = ["data.train_batch_size=2", f"model.tokenizer_path={tmp_path / 'larger'}"]
    with pytest.raises(
        ValueError,
        match=r"row 1: token 68 \('##'\) is none of the 68 of the model .*tokenizer_path",
    ):
        check_inputs(config_of(model_path, file, *own), None)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "+model.override_config.vocab_size=67",
            r"does not fit its configuration: .* \[68, 64\] .*, and \[67, 64\]",
        ),
        ("data.train_files=no_such.jsonl", "data file no_such.jsonl does not exist"),
        ("data.train_batch_size=4", "has 2 rows, fewer than data.train_batch_size=4"),
        ("model.path=./no_model", r"model\.path=\./no_model: there is no model"),
        (
            "+model.override_config.max_position_embeddings=4",
            "has 4 positions; .*row 0: the conversation has 8 tokens",
        ),
        (
            "+model.override_config.attn_implementation=flash_attention_2",
            "flash-attn is not installed",
        ),
        (
            "ray_kwargs.ray_init.num_cpus=1",
            r"(?s)model_pool .*trainer\.nnodes and trainer\.n_gpus_per_node",
        ),
        pytest.param(
            "trainer.device=cuda",
            "trainer.device=cuda, but this machine has no CUDA",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="this machine has a CUDA device"
            ),
        ),
    ],
)
def test_what_cannot_run_is_refused_before_ray_starts(
    setting: str, message: str, model_path: str, tmp_path: Path
):
    file = write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": "ab", "response": "cde"}, {"prompt": "ab", "response": "=d"}],
    )
    own = ["data.train_batch_size=2", "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2"]
    with pytest.raises(ValueError, match=message):
        check_inputs(config_of(model_path, file, *own, setting), None)
