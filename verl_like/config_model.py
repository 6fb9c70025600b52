"""The base classes and types of the configuration's models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _refuse_zero(value: int) -> int:
    if value == 0:
        raise ValueError("expected -1 (no limit, all, or never) or a positive number")
    return value


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
MinusOneOrPositive = Annotated[int, Field(ge=-1), AfterValidator(_refuse_zero)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
FromZeroToOne = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


class ConfigModel(BaseModel):
    """The base of all blocks of the configuration. Unknown keys and values of another type are
    refused, and instances are read-only."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Returns a copy in which some keys have other values. A key in a block below this one is
        given by its path, for instance "trainer.seed"."""
        config = self
        for path, value in values.items():
            name, _, rest = path.partition(".")
            if rest:
                block = getattr(config, name)
                value = block.updated({rest: value})
            config = config.model_copy(update={name: value})
        return config


class OpenConfigModel(ConfigModel):
    """The base of a block to which the chosen algorithm adds its own options. `load_config` refuses
    any other key."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Follows:
    """Says in the annotation of a field that its default follows other keys, for instance
    `Follows("${data.max_prompt_length}")`."""

    keys: str
