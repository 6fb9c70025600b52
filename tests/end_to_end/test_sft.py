"""Fine-tuning, a reward model, DPO and ILQL: whole runs, in one process and on Ray, and those that
are continued."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_workers import shared_template
from runs import largest_difference, metrics_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from verl_like.protocol import DataProto
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.supervised import (
    DPOConfig,
    ILQLConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
    broken_supervised_rules,
)
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.resume import find_run
from verl_like.trainer.supervised.run_supervised import (
    KINDS,
    check_inputs,
    run_supervised,
    worker_arguments,
)
from verl_like.trainer.supervised.trainer import SupervisedTrainer

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ '<eos>' if m['role'] == 'assistant' else "
    "'=' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model_path(tiny_llama: Callable) -> str:
    """A model whose template ends a question with = and an answer with <eos>."""
    return tiny_llama(template=TEMPLATE)[0]


def config_in(
    folder: Path, model_path: str, *settings: str, schema: type[SupervisedConfig] = SFTConfig
) -> Any:
    """A run on sums of one digit, of six rows a step; the rejected answer of a pair is a wrong
    one."""
    folder.mkdir(exist_ok=True)
    numbers = random.Random(0)
    pairs = [(numbers.randint(0, 9), numbers.randint(0, 9)) for _ in range(40)]
    rows = []
    for a, b in pairs:
        row = {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "response": str(a + b)}
        rows.append(
            json.dumps(
                row
                | {"chosen": str(a + b), "rejected": f"{a}{b}", "margin": 0.1 * a, "score": a - b}
            )
        )
    (folder / "train.jsonl").write_text("\n".join(rows[:33]))
    (folder / "val.jsonl").write_text("\n".join(rows[33:]))
    own = [
        f"data.train_files={folder}/train.jsonl",
        f"data.val_files={folder}/val.jsonl",
        f"model.path={model_path}",
    ]
    own += [
        "trainer.device=cpu",
        "data.train_batch_size=6",
        "training.optim.lr=3e-3",
        "trainer.save_freq=2",
    ]
    own += [
        "training.max_token_len_per_gpu=20",
        f"trainer.default_local_dir={folder}/runs",
        "trainer.test_freq=3",
    ]
    return load_config(
        schema, broken_supervised_rules, [*own, "trainer.total_training_steps=6", *settings]
    )


def trainer_in(config: SupervisedConfig) -> SupervisedTrainer:
    """A trainer whose worker is in this process, of a new run or of the one that goes on."""
    inputs, kind = check_inputs(config, None), KINDS[type(config)]
    config = inputs.config
    group = LocalWorkerGroup(
        RayClassWithInitArgs(kind.worker, *worker_arguments(config)), 1, role="model"
    )
    recorder = RunRecorder(config, kind.display, find_run(config)[0])
    trainer = SupervisedTrainer(config, inputs.train_dataset, inputs.val_dataset, group, recorder)
    trainer.init_workers()
    return trainer


def run_here(config: SupervisedConfig, last_step: int | None = None) -> None:
    """A run in this process, which is interrupted in the middle of the step after `last_step`."""
    trainer = trainer_in(config)
    collate = trainer.train_dataset.collate

    def collate_or_end(rows: list[int]) -> DataProto:
        if trainer.global_step - 1 == last_step:
            raise KeyboardInterrupt
        return collate(rows)

    trainer.train_dataset.collate = collate_or_end
    if last_step is None:
        trainer.fit()
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    trainer.recorder.close("Done.")


def numbers_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step without its times."""
    return [
        {
            k: v
            for k, v in row.items()
            if not k.startswith(("timing_s/", "perf/")) and "/perf/" not in k
        }
        for row in metrics_of(folder)
    ]


@pytest.mark.parametrize(
    "schema", [SFTConfig, pytest.param(RMConfig, marks=pytest.mark.proof), DPOConfig, ILQLConfig]
)
def test_a_run_that_is_continued_equals_one_that_was_not_interrupted_and_learns(
    schema: type[SupervisedConfig], tmp_path: Path, model_path: str
):
    run_here(config_in(tmp_path / "whole", model_path, schema=schema))
    run_here(config_in(tmp_path / "parts", model_path, schema=schema), last_step=3)
    run_here(config_in(tmp_path / "parts", model_path, schema=schema))
    whole, parts = numbers_of(tmp_path / "whole"), numbers_of(tmp_path / "parts")
    assert whole == parts and [row["step"] for row in whole] == list(range(7))
    losses = [row["val-core/loss"] for row in whole if "val-core/loss" in row]
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]
    folder = "runs/latest/global_step_6/model/huggingface"
    files = [
        path.relative_to(tmp_path / "whole")
        for path in (tmp_path / "whole" / folder).rglob("*.safetensors")
    ]
    assert len(files) == 1 + (schema is ILQLConfig)
    for file in files:
        models = [load_file(tmp_path / name / file) for name in ("whole", "parts")]
        assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


def test_the_checkpoint_of_the_lowest_validation_loss_is_kept(tmp_path: Path, model_path: str):
    settings = [
        "trainer.best_ckpt_metric=val-core/loss",
        "trainer.max_ckpt_to_keep=1",
        "trainer.test_freq=1",
    ]
    # Steps this large make the loss of a later step higher again.
    run_here(
        config_in(tmp_path, model_path, *settings, "trainer.save_freq=-1", "training.optim.lr=0.3")
    )
    losses = {row["step"]: row["val-core/loss"] for row in metrics_of(tmp_path) if row["step"]}
    best = min(losses, key=losses.get)
    assert best < 6 and losses[best] < max(losses.values())
    run = tmp_path / "runs/latest"
    assert checkpoint.steps(run) == [best, 6]
    assert [str(path.relative_to(run)) for path in run.glob("*/model/huggingface")] == [
        "global_step_6/model/huggingface"
    ]
    with pytest.raises(
        ConfigError, match=r"best_ckpt_metric=val-core/loss is .*; set data\.val_files"
    ):
        config_in(tmp_path, model_path, *settings, "data.val_files=[]")


@pytest.mark.ray
@pytest.mark.parametrize(
    ("schema", "auto_class"),
    [
        (SFTConfig, AutoModelForCausalLM),
        pytest.param(RMConfig, AutoModelForSequenceClassification, marks=pytest.mark.proof),
        pytest.param(DPOConfig, AutoModelForCausalLM, marks=pytest.mark.proof),
        pytest.param(ILQLConfig, AutoModelForCausalLM, marks=pytest.mark.proof),
    ],
)
def test_two_ranks_learn_what_one_does_and_leave_a_model_that_loads(
    schema: type[SupervisedConfig], auto_class: Any, tmp_path: Path, model_path: str
):
    run_here(config_in(tmp_path / "one", model_path, schema=schema))
    config = config_in(tmp_path / "two", model_path, "trainer.n_gpus_per_node=2", schema=schema)
    assert run_supervised(config, shared_template()) == 0
    for one, two in zip(numbers_of(tmp_path / "one"), numbers_of(tmp_path / "two"), strict=True):
        names = [name for name in one if not name.startswith(("global_seqlen/", "training/"))]
        assert {name: two[name] for name in names} == pytest.approx(
            {name: one[name] for name in names}, rel=1e-4
        )
    auto_class.from_pretrained(tmp_path / "two/runs/latest/global_step_6/model/huggingface")


@pytest.mark.ray
@pytest.mark.proof
def test_a_run_goes_on_on_other_ranks_with_equal_numbers(
    tmp_path: Path, model_path: str, record_property: Callable[[str, object], None]
):
    for name, parts in (("whole", [(2, 24)]), ("parts", [(2, 8), (1, 16), (4, 24)])):
        for ranks, steps in parts:
            settings = [f"trainer.n_gpus_per_node={ranks}", f"trainer.total_training_steps={steps}"]
            config = config_in(
                tmp_path / name,
                model_path,
                *settings,
                "data.train_batch_size=8",
                "ray_kwargs.ray_init.num_cpus=4",
            )
            assert run_supervised(config, shared_template()) == 0
    difference, metric = largest_difference(tmp_path / "parts", tmp_path / "whole")
    assert difference < 1e-5, metric
    print(f"| `main_sft` | 2 -> 1 -> 4 | | 24 of 24 steps | {difference:.0e}, `{metric}` | |")
    record_property("result", f"24 of 24 steps within {difference:.0e}")
