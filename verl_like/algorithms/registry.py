"""How an algorithm is found, what it needs, and how it is called. Loads no torch: the configuration
is checked with it.

An algorithm is a function in a file of its own, `<package>/<name>.py`, decorated with the name of
the file. Its inputs are given by parameter name, so the parameters without a default are what it
needs from the run. Its own options are a class in `<package>/<name>_options.py`, which loads no
torch; a plugin's class may be anywhere. `<package>/_facts.py` repeats what the configuration is
checked with, so that no file of an algorithm is imported for that.
"""

import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_origin, get_type_hints

from verl_like.config_model import ConfigModel
from verl_like.registry import Registered, Registry

Algorithm = Callable[..., Any]
_OPTIONS = "_options"
"""How the name of a file ends that holds the options of an algorithm."""


@dataclass(frozen=True)
class AlgorithmFacts:
    """What the check of a configuration has to know of an algorithm."""

    needs: frozenset[str]
    """Its `required_inputs`."""
    loss_agg_mode: str = "token-mean"
    """The aggregation that a policy loss is defined with."""
    over_batch: bool = False
    """Whether it compares the rows of a batch with each other, beyond the responses to a prompt."""
    by_position: bool = False
    """Whether it compares tokens at equal positions of responses, also behind inserted tokens. No
    signature tells that, so of a plugin it is not known."""


class AlgorithmOptions(ConfigModel):
    """Base of an algorithm's own options. Its fields are keys of `section`, each with a default and
    a docstring.

    A function takes them as its parameter `options`, annotated with the class.
    """

    section: ClassVar[str]
    """The block of the configuration that holds the keys."""


class AlgorithmRegistry(Registry[Algorithm]):
    """The algorithms of one kind: a file each in `package`, and those that plugins register.

    Args:
        kind: what they are called in messages.
        package: the package that holds the files; one whose name starts with an underscore or ends
            in `_options` holds no algorithm.
        decorator: the name of the decorator, for messages.
        inputs: the parameters that a run can provide.
        known_facts: the facts of algorithms that have a file, by the name of the file.
        aliases: further names of algorithms that have a file, each with the name of the file.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        decorator: str,
        inputs: frozenset[str],
        known_facts: Mapping[str, AlgorithmFacts],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(kind, decorator)
        self.package = package
        self.inputs = inputs
        self.known_facts = known_facts
        self.aliases = dict(aliases or {})
        self.over_batch: set[str] = set()
        """The algorithms that compare all rows of a batch with each other, and not only the
        responses to one prompt."""

    def modules(self) -> list[str]:
        """Returns the names of the files of the package."""
        found = pkgutil.iter_modules(sys.modules[self.package].__path__)
        return sorted(module.name for module in found)

    def file_names(self) -> list[str]:
        """Returns the algorithms that have a file here."""
        names = []
        for name in self.modules():
            if not name.startswith("_") and not name.endswith(_OPTIONS):
                names.append(name)
        return names

    def names(self) -> list[str]:
        """Returns the names of all algorithms, sorted."""
        names = {*self.file_names(), *self.aliases, *self.entries}
        return sorted(names)

    def file_options(self, name: str) -> type[AlgorithmOptions] | None:
        """Returns the options of an algorithm that has a file here, or None if it has none. The
        file itself is not imported."""
        if name + _OPTIONS not in self.modules():
            return None
        module = importlib.import_module(f"{self.package}.{name}{_OPTIONS}")
        classes = []
        for declared in vars(module).values():
            if isinstance(declared, type) and declared.__module__ == module.__name__:
                assert issubclass(declared, AlgorithmOptions), f"{declared} is no class of options"
                classes.append(declared)
        assert len(classes) == 1, (
            f"{module.__name__} has {len(classes)} classes of options, not one"
        )
        return classes[0]

    def options_of(self, name: str) -> type[AlgorithmOptions] | None:
        """Returns the options of an algorithm, or None if it has none. Its file is imported only if
        `known_facts` lacks it.

        Raises:
            ValueError: there is no such algorithm; the message lists the known ones.
        """
        own = self.aliases.get(name, name)
        if own in self.known_facts:
            return self.file_options(own)
        return options_class(self.get(name))

    def facts(self, name: str) -> AlgorithmFacts:
        """Returns the facts of an algorithm. Its file is imported only if `known_facts` lacks it.

        Raises:
            ValueError: there is no such algorithm; the message lists the known ones.
        """
        own = self.aliases.get(name, name)
        if own in self.known_facts:
            return self.known_facts[own]
        function = self.get(name)
        return facts_of(function, over_batch=name in self.over_batch)

    def may_declare(self, name: str, option: str) -> bool:
        """Returns whether the algorithm `name` may have an option like `option`.

        The answer is True if the algorithm has no file here, because a plugin may register it, or
        if the name of one of its options is close to `option`. The file of the algorithm is not
        imported, because it loads torch.
        """
        name = self.aliases.get(name, name)
        if name not in self.file_names():
            return True
        declared = self.file_options(name)
        if declared is None:
            return False
        matches = difflib.get_close_matches(option, declared.model_fields, cutoff=0.7)
        return bool(matches)

    def name_with_option(self, key: str) -> str | None:
        """Returns the algorithm with a file here whose options have the configuration key `key`, or
        None if there is none."""
        for name in self.file_names():
            declared = self.file_options(name)
            if declared and key in option_keys(declared):
                return name
        return None

    def is_taken(self, name: str, entry: Algorithm) -> bool:
        if name in self.entries or name in self.aliases:
            return True
        has_file = name in self.file_names()
        return has_file and entry.__module__ != f"{self.package}.{name}"

    def check(self, name: str, entry: Algorithm) -> None:
        """Raises ValueError if the name is taken, or a parameter without a default is none of the
        inputs."""
        super().check(name, entry)
        for parameter in required_inputs(entry) - self.inputs:
            nearest = difflib.get_close_matches(parameter, self.inputs, 1)
            hint = f", which are {', '.join(sorted(self.inputs))}"
            if nearest:
                hint = f"; did you mean {nearest[0]}?"
            raise ValueError(
                f"{self.kind} {name!r} requires the parameter {parameter!r}, which is none of "
                f"the inputs of an {self.kind}: give it a default or another name{hint}"
            )

    def register(
        self, name: str, *, over_batch: bool = False
    ) -> Callable[[Registered], Registered]:
        """Returns a decorator that makes a function known as `name`; it raises as `check` does.

        Args:
            over_batch: it takes statistics, such as the mean, of all rows of a batch, of which
                there have to be many. So `detached.update_in_flight` refuses it.
        """
        register = super().register(name)

        def decorate(function: Registered) -> Registered:
            register(function)
            if over_batch:
                self.over_batch.add(name)
            return function

        return decorate

    def get(self, name: str) -> Algorithm:
        """Returns the function registered as `name`; its file is imported first.

        Raises:
            ValueError: there is none; the message lists the known ones.
        """
        name = self.aliases.get(name, name)
        if name not in self.entries and name in self.file_names():
            importlib.import_module(f"{self.package}.{name}")
        return super().get(name)


def required_inputs(function: Algorithm) -> frozenset[str]:
    """Returns the parameters without a default, but for `config` and `options`, which every
    algorithm may have."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = set()
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        has_default = parameter.default is not parameter.empty
        if not has_default and parameter.kind not in variadic:
            required.add(parameter.name)
    return frozenset(required - {"config", "options"})


def facts_of(function: Algorithm, over_batch: bool) -> AlgorithmFacts:
    """Returns the facts that a signature tells, and `over_batch`.

    The default of the parameter `loss_agg_mode` is the aggregation that a loss is defined with.
    """
    parameters = inspect.signature(function).parameters
    needs = required_inputs(function)
    if "loss_agg_mode" in parameters:
        default = parameters["loss_agg_mode"].default
        if isinstance(default, str):
            return AlgorithmFacts(needs, default, over_batch)
    return AlgorithmFacts(needs, over_batch=over_batch)


def described_fields(inputs: type[Any]) -> dict[str, str]:
    """Returns the texts with which the fields of a class of inputs are annotated, by name."""
    texts = {}
    for field in fields(inputs):
        annotation: Any = field.type
        if get_origin(annotation) is Annotated:
            texts[field.name] = annotation.__metadata__[0]
    return texts


def option_keys(declared: type[AlgorithmOptions]) -> list[str]:
    """Returns the keys of an algorithm's own options, as full paths in the configuration."""
    return [f"{declared.section}.{name}" for name in declared.model_fields]


def options_class(function: Algorithm) -> type[AlgorithmOptions] | None:
    """Returns the class of the function's own options; None when it has none."""
    if "options" not in inspect.signature(function).parameters:
        return None
    found = get_type_hints(function).get("options")
    assert isinstance(found, type) and issubclass(found, AlgorithmOptions), (
        f"{function} does not annotate options"
    )
    return found


def read_options(function: Algorithm, **blocks: ConfigModel) -> AlgorithmOptions | None:
    """Reads the function's own options from the configuration, with their defaults; returns None
    when it has none.

    Args:
        blocks: the blocks of the configuration at the start of `section`, by name.
    """
    declared = options_class(function)
    if declared is None:
        return None
    first, *rest = declared.section.split(".")
    block = blocks[first]
    for name in rest:
        block = getattr(block, name)
    extra = block.model_extra or {}
    given = {}
    for name, value in extra.items():
        if name in declared.model_fields:
            given[name] = value
    return declared.model_validate(given)


def call_by_name(function: Algorithm, inputs: Mapping[str, Any]) -> Any:
    """Calls `function` with those of `inputs` that it has parameters for, but for those that are
    None.

    Raises:
        ValueError: an input without a default is not there.
    """
    parameters = inspect.signature(function).parameters
    given = {}
    for name in parameters:
        value = inputs.get(name)
        if value is not None:
            given[name] = value
    missing = sorted(required_inputs(function) - given.keys())
    if missing:
        raise ValueError(
            f"{function.__name__} needs {', '.join(missing)}, which this run does not provide"
        )
    return function(**given)
