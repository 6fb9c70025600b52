"""Renders the parts of docs/algorithms.md that come from the algorithms' files; the rest is written
by hand."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from config_page import values_of

from verl_like.algorithms import advantages, policy_losses
from verl_like.algorithms.corrections.importance_sampling import compute_rollout_correction_weights
from verl_like.algorithms.corrections.rejection import compute_rollout_rejection_mask
from verl_like.algorithms.registry import AlgorithmRegistry, options_class, required_inputs

CORRECTIONS = (compute_rollout_correction_weights, compute_rollout_rejection_mask)


def render_algorithms_page(page: str) -> str:
    """The page with the text between its marks of generated parts made anew."""
    parts = {
        "advantage estimators": _sections(advantages.ADVANTAGE_ESTIMATORS, advantages.INPUTS),
        "policy losses": _sections(policy_losses.POLICY_LOSSES, policy_losses.INPUTS),
        "corrections": "".join(f"{_about(each)}{_code(each)}\n" for each in CORRECTIONS),
    }
    for kind, text in parts.items():
        begin = f"<!-- generated: {kind} -->\n"
        end = f"<!-- end of the {kind} -->\n"
        assert begin in page and end in page, f"docs/algorithms.md has lost a mark of the {kind}"
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def _sections(registry: AlgorithmRegistry, inputs: Mapping[str, str]) -> str:
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in inputs.items())
    return f"\n| input | what it is |\n|---|---|\n{rows}" + "".join(
        _section(registry.get(name)) for name in registry.file_names()
    )


def _section(function: Callable[..., Any]) -> str:
    needs = ", ".join(f"`{need}`" for need in sorted(required_inputs(function)))
    text = f"{_about(function)}Needs: {needs}. {_code(function)}\n"
    declared = options_class(function)
    if declared is None:
        return text
    schemas = declared.model_json_schema()["properties"]
    rows = "".join(
        f"| `{key}` | `{field.default}` | {values_of(schemas[key], field.default is None)} | "
        f"{' '.join((field.description or '').split())} |\n"
        for key, field in declared.model_fields.items()
    )
    return (
        f"{text}\n| key in `{declared.section}` | default | values | meaning "
        f"|\n|---|---|---|---|\n{rows}"
    )


def _about(function: Callable[..., Any]) -> str:
    """A heading, the name of the function's file, and the file's docstring."""
    module = inspect.getmodule(function)
    assert module is not None and module.__doc__, f"the file of {function} has no documentation"
    return f"\n### {module.__name__.rpartition('.')[2]}\n\n{module.__doc__.strip()}\n\n"


def _code(function: Callable[..., Any]) -> str:
    return f"Code: `{function.__name__}` in `{function.__module__.replace('.', '/')}.py`."
