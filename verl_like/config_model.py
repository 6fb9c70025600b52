"""The base of all settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _refuse_zero(value: int) -> int:
    if value == 0:
        raise ValueError("expected -1 (no limit, all, or never) or a positive number")
    return value


PositiveInt = Annotated[int, Field(gt=0)]
MinusOneOrPositive = Annotated[int, Field(ge=-1), AfterValidator(_refuse_zero)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class ConfigModel(BaseModel):
    """Base of all settings: unknown keys are refused, values keep their type, instances are
    read-only."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values of some keys, which are given by their path from here."""
        config = self
        for path, value in values.items():
            name, _, rest = path.partition(".")
            value = getattr(config, name).updated({rest: value}) if rest else value
            config = config.model_copy(update={name: value})
        return config


class OpenConfigModel(ConfigModel):
    """A block to which the chosen algorithm adds its own options; `load_config` refuses any other
    key."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Follows:
    """In the annotation of a field: the default of the field follows other keys, e.g.
    `Follows("${data.max_prompt_length}")`."""

    keys: str
