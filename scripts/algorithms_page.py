"""Renders the parts of docs/algorithms.md that come from the algorithms' files; the rest is written by hand."""

import inspect
from collections.abc import Mapping

from config_page import values_of

from verl_like.algorithms import advantages, policy_losses
from verl_like.algorithms.registry import Registry, options_class, required_inputs

KINDS = {
    "advantage estimators": (advantages.ADVANTAGE_ESTIMATORS, advantages.INPUTS),
    "policy losses": (policy_losses.POLICY_LOSSES, policy_losses.INPUTS),
}


def render_algorithms_page(page: str) -> str:
    """The page with the text between its marks of generated parts made anew."""
    for kind, (registry, inputs) in KINDS.items():
        begin, end = f"<!-- generated: {kind} -->\n", f"<!-- end of the {kind} -->\n"
        assert begin in page and end in page, f"docs/algorithms.md has lost a mark of the {kind}"
        before, _, rest = page.partition(begin)
        page = before + begin + _sections(registry, inputs) + end + rest.partition(end)[2]
    return page


def _sections(registry: Registry, inputs: Mapping[str, str]) -> str:
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in inputs.items())
    return f"\n| input | what it is |\n|---|---|\n{rows}" + "".join(
        _section(registry, name) for name in registry.file_names()
    )


def _section(registry: Registry, name: str) -> str:
    function = registry.get(name)
    module = inspect.getmodule(function)
    assert module is not None and module.__doc__, f"{registry.kind} {name} has no documentation"
    needs = ", ".join(f"`{need}`" for need in sorted(required_inputs(function)))
    path = f"{module.__name__.replace('.', '/')}.py"
    text = f"\n### {name}\n\n{module.__doc__.strip()}\n\nNeeds: {needs}. Code: `{function.__name__}` in `{path}`.\n"
    declared = options_class(function)
    if declared is None:
        return text
    schemas = declared.model_json_schema()["properties"]
    rows = "".join(
        f"| `{key}` | `{field.default}` | {values_of(schemas[key], field.default is None)} | "
        f"{' '.join((field.description or '').split())} |\n"
        for key, field in declared.model_fields.items()
    )
    return f"{text}\n| key in `{declared.section}` | default | values | meaning |\n|---|---|---|---|\n{rows}"
