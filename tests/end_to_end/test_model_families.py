"""Every causal family of transformers computes the same in trainer, engine and export, or is
refused before a run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from model_families import (
    NotTried,
    Refused,
    TrainedFamily,
    engine_error,
    responses_of,
    train_family,
    vllm_process,
)
from tiny_families import FAMILIES

from verl_like.protocol import DataProto
from verl_like.workers.rollout.vllm_families import SERVED

LARGEST_ERROR = 1e-4
"""Of a log-probability in float32. Another model, such as one with another window, is off by 1e-3
and more."""

Row = tuple[str, str, str, str]
"""Trainer against transformers, engine and its error, export against trainer; or the reason why
there is none."""


def numbers(family: TrainedFamily, engine: str, error: float) -> Row:
    assert max(family.trainer_error, error, family.export_error) < LARGEST_ERROR, (
        family,
        engine,
        error,
    )
    return f"{family.trainer_error:.0e}", f"{engine} {error:.0e}", f"{family.export_error:.0e}", ""


@pytest.mark.parametrize("model_type", ["gemma2", "gemma4_text", "deepseek_v3", "ernie4_5_moe"])
def test_a_family_computes_the_same_in_trainer_engine_and_export(model_type: str, tmp_path: Path):
    family = train_family(model_type, tmp_path)
    numbers(family, "hf", engine_error(family, responses_of("hf", family.path, family.export)))


@pytest.mark.parametrize("model_type", ["doge", "bart", "mamba2", "gptj"])
def test_a_family_that_would_compute_something_else_is_refused(model_type: str, tmp_path: Path):
    with pytest.raises(Refused):
        train_family(model_type, tmp_path)


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.timeout(2400)
def test_every_family_computes_the_same_in_trainer_engine_and_export_or_is_refused(
    tmp_path: Path, record_property: Callable[[str, object], None]
):
    rows: dict[str, Row] = {}
    trained: dict[str, TrainedFamily] = {}
    with vllm_process() as vllm:
        for model_type in FAMILIES:
            try:
                trained[model_type] = train_family(model_type, tmp_path / model_type)
            except (Refused, NotTried) as error:
                what = "refused" if isinstance(error, Refused) else "not tried"
                rows[model_type] = "", "", "", f"{what}: {reason_of(error, tmp_path / model_type)}"
                continue
            family = trained[model_type]
            if model_type in SERVED:
                vllm.submit(family)
            else:
                responses = responses_of("hf", family.path, family.export)
                rows[model_type] = numbers(family, "hf", engine_error(family, responses))
        for model_type in [name for name in trained if name in SERVED]:
            family, answer = trained[model_type], vllm.answer()
            assert isinstance(answer, DataProto), f"{model_type}: {answer}"
            rows[model_type] = numbers(family, "vllm", engine_error(family, answer))
    assert rows.keys() == set(FAMILIES) and trained.keys() >= SERVED
    record_property(
        "result", f"{len(trained)} of {len(rows)} families agree, {len(SERVED)} of them in vLLM too"
    )
    record_property("families", table(rows))


def reason_of(error: ValueError, folder: Path) -> str:
    """What an error says but for the key and path of a test, and the advice."""
    text = str(error).replace(f"model.path={folder}", "").removeprefix(":").removeprefix(" ")
    return text.removesuffix("; choose another model.").removesuffix(
        "; choose a model with full or sliding attention."
    )


def table(rows: dict[str, Row]) -> str:
    lines = ["| family | trainer | engine | export | reason |", "|---|---|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {' | '.join(rows[name])} |" for name in sorted(rows))]
    )
