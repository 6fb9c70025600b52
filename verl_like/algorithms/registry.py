"""How an algorithm is found, what it needs, and how it is called. Loads no torch: the configuration
is checked with it.

An algorithm is a function in a file of its own, `<package>/<name>.py`, decorated with the name of
the file. Its inputs are given by parameter name, so the parameters without a default are what it
needs from the run.
"""

import difflib
import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from verl_like.config_model import ConfigModel

Algorithm = Callable[..., Any]
AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm)


class AlgorithmOptions(ConfigModel):
    """Base of an algorithm's own options. Its fields are keys of `section`, each with a default and
    a docstring.

    A function takes them as its parameter `options`, annotated with the class.
    """

    section: ClassVar[str]
    """The block of the configuration that holds the keys."""


class Registry:
    """The algorithms of one kind: a file each in `package`, and those that plugins register.

    Args:
        kind: what they are called in messages.
        package: the package that holds the files; a name that starts with an underscore is no
            algorithm.
        decorator: the name of the decorator, for messages.
        inputs: the parameters that a run can provide.
    """

    def __init__(self, kind: str, package: str, decorator: str, inputs: frozenset[str]) -> None:
        self.kind = kind
        self.package = package
        self.decorator = decorator
        self.inputs = inputs
        self.functions: dict[str, Algorithm] = {}
        self.over_batch: set[str] = set()
        """Those of them that compare the rows of a batch with each other, beyond the responses to a
        prompt."""

    def file_names(self) -> list[str]:
        """The algorithms that have a file here."""
        files = pkgutil.iter_modules(sys.modules[self.package].__path__)
        return sorted(file.name for file in files if not file.name.startswith("_"))

    def may_declare(self, name: str, option: str) -> bool:
        """Whether `name` may have an option like `option`, without importing its file, which loads
        torch.

        True for what a plugin registers, and where the text of the file annotates a name close to
        the option's.
        """
        if name not in self.file_names():
            return True
        text = (Path(sys.modules[self.package].__path__[0]) / f"{name}.py").read_text()
        fields = re.findall(r"^    (\w+): ", text, flags=re.MULTILINE)
        return bool(difflib.get_close_matches(option, fields, 1, cutoff=0.7))

    def name_with_option(self, key: str) -> str | None:
        """The algorithm with a file here whose options have the configuration key `key`, if there
        is one."""
        for name in self.file_names():
            declared = (
                options_class(self.get(name))
                if self.may_declare(name, key.rpartition(".")[2])
                else None
            )
            if declared and key in [
                f"{declared.section}.{option}" for option in declared.model_fields
            ]:
                return name
        return None

    def register(
        self, name: str, *, over_batch: bool = False
    ) -> Callable[[AlgorithmT], AlgorithmT]:
        """Decorator: makes a function known as `name`.

        Args:
            over_batch: it takes statistics, such as the mean, of all rows of a batch, of which
                there have to be many.

        Raises:
            ValueError: the name is taken, or a parameter without a default is none of the inputs.
        """

        def decorate(function: AlgorithmT) -> AlgorithmT:
            own_file = f"{self.package}.{name}"
            if name in self.functions or (
                name in self.file_names() and function.__module__ != own_file
            ):
                raise ValueError(f"{self.kind} {name!r} is already registered: choose another name")
            for parameter in required_inputs(function) - self.inputs:
                nearest = difflib.get_close_matches(parameter, self.inputs, 1)
                hint = (
                    f"; did you mean {nearest[0]}?"
                    if nearest
                    else f", which are {', '.join(sorted(self.inputs))}"
                )
                raise ValueError(
                    f"{self.kind} {name!r} requires the parameter {parameter!r}, which is none of "
                    f"the inputs of an {self.kind}: give it a default or another name{hint}"
                )
            self.functions[name] = function
            if over_batch:
                self.over_batch.add(name)
            return function

        return decorate

    def get(self, name: str) -> Algorithm:
        """The function registered as `name`; its file is imported first.

        Raises:
            ValueError: there is none; the message lists the known ones.
        """
        if name not in self.functions and name in self.file_names():
            importlib.import_module(f"{self.package}.{name}")
        if name not in self.functions:
            known = sorted({*self.file_names(), *self.functions})
            # Another first letter makes another acronym: dapo is no sapo.
            nearest = difflib.get_close_matches(
                name, [each for each in known if each[:1] == name[:1]], 1
            )
            raise ValueError(
                f"unknown {self.kind} "
                f"{name!r}{f'; did you mean {nearest[0]}?' if nearest else '.'} Known are "
                f"{', '.join(known)}; a plugin adds one with @{self.decorator}"
            )
        return self.functions[name]


def required_inputs(function: Algorithm) -> frozenset[str]:
    """The parameters without a default, but for `config` and `options`, which every algorithm may
    have."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {
        each.name for each in parameters if each.default is each.empty and each.kind not in variadic
    }
    return frozenset(required - {"config", "options"})


def options_class(function: Algorithm) -> type[AlgorithmOptions] | None:
    """The class of the function's own options; None when it has none."""
    if "options" not in inspect.signature(function).parameters:
        return None
    found = get_type_hints(function).get("options")
    assert isinstance(found, type) and issubclass(found, AlgorithmOptions), (
        f"{function} does not annotate options"
    )
    return found


def read_options(function: Algorithm, **blocks: ConfigModel) -> AlgorithmOptions | None:
    """The function's own options as the configuration has them, with their defaults; None when it
    has none.

    Args:
        blocks: the blocks of the configuration at the start of `section`, by name.
    """
    declared = options_class(function)
    if declared is None:
        return None
    first, *rest = declared.section.split(".")
    block = functools.reduce(getattr, rest, blocks[first])
    given = block.model_extra or {}
    return declared.model_validate(
        {name: given[name] for name in declared.model_fields if name in given}
    )


def call_by_name(function: Algorithm, inputs: Mapping[str, Any]) -> Any:
    """Calls `function` with those of `inputs` that it has parameters for; an input that is None is
    left out.

    Raises:
        ValueError: an input without a default is not there.
    """
    parameters = inspect.signature(function).parameters
    given = {name: inputs[name] for name in parameters if inputs.get(name) is not None}
    missing = sorted(required_inputs(function) - given.keys())
    if missing:
        raise ValueError(
            f"{function.__name__} needs {', '.join(missing)}, which this run does not provide"
        )
    return function(**given)
