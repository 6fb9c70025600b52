"""Imports the modules of the user that the key `plugins` names. They register algorithms, rewards,
rollout engines and trainers."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

MOVED = {
    "verl_like.trainer.display": "verl_like.trainer.run.display",
    "verl_like.trainer.experience": "verl_like.trainer.loop.experience",
    "verl_like.trainer.experience_maker": "verl_like.trainer.ppo.experience_maker",
    "verl_like.trainer.learner": "verl_like.trainer.ppo.learner",
    "verl_like.trainer.maker_driver": "verl_like.trainer.ppo.maker_driver",
    "verl_like.trainer.ppo_trainer": "verl_like.trainer.ppo.ray_trainer",
    "verl_like.trainer.run_ppo": "verl_like.trainer.ppo.run_ppo",
    "verl_like.trainer.training_loop": "verl_like.trainer.loop.training_loop",
    "verl_like.workers.weight_sync": "verl_like.workers.weights",
}
"""Modules that the documents once named, each with the module that has its names now."""


def import_plugins(modules: Sequence[str]) -> None:
    """Imports the modules, which register what they add. A module that was imported before is not
    imported again.

    Raises ValueError, with the reason, for a module that cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a script may end itself
            advice = "correct the module, or give package.module with the package on PYTHONPATH"
            if isinstance(error, ModuleNotFoundError) and error.name in MOVED:
                advice = f"import from {MOVED[error.name]}, where its names are now"
            raise ValueError(
                f"plugins: {module} cannot be imported ({type(error).__name__}: {error}): {advice}"
            ) from error


class Extensible:
    """The base of classes that plugins extend.

    `replaced_methods` has methods of earlier versions, which nothing calls any more, each with what
    there is instead. Raises ValueError for a class that extends this one and defines such a method.
    """

    replaced_methods: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for base in cls.__mro__[1:]:
            replaced = vars(base).get("replaced_methods", {})
            for name, instead in replaced.items():
                inherited = getattr(base, name, None)
                if getattr(cls, name, None) is inherited:
                    continue
                its_method = "its own" if inherited else "a method"
                raise ValueError(
                    f"{cls.__module__}.{cls.__name__} has {its_method} {name}, which nothing calls "
                    f"any more: {instead}"
                )
