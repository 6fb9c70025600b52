"""The strategies of the ColossalAI way: which processes train, and what is saved of them."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from verl_like.compat.models import Model


class Strategy:
    """Which processes train, and by its name what each of them holds (docs/memory.md).

    Args:
        num_processes: by default one for each GPU, and two where there is none.
        offload: whether parameters and Adam's state are in host memory while they are not used.
        seed: of new weights, the order of the prompts, and sampling; below 2^32, or ValueError is
            raised.
    """

    name = "ddp"

    def __init__(
        self, num_processes: int | None = None, offload: bool = False, seed: int = 42
    ) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(
                f"{type(self).__name__}: seed={seed}, give a number from 0 to 4294967295"
            )
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.num_processes = num_processes or torch.cuda.device_count() or 2
        self.offload = offload
        self.seed = seed

    @contextlib.contextmanager
    def model_init_context(self) -> Iterator[None]:
        """Within it new weights are of the seed."""
        Model.source = None
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            yield

    def prepare(self, *given: Any) -> Any:
        """Returns the models and (model, optimizer) pairs as they are, for `fit` places them."""
        return given if len(given) > 1 else given[0]

    def save_model(self, model: Model, path: str, only_rank0: bool = True) -> None:
        """Writes a folder that transformers loads, in float32."""
        if not only_rank0:
            raise ValueError(
                "save_model with only_rank0=False: every rank would write the same; leave it True"
            )
        model.hf.save_pretrained(path)

    def load_model(self, model: Model, path: str, strict: bool = True) -> None:
        """Reads such a folder. What it does not have stays as it is, or with `strict` raises
        ValueError."""
        hf = model.hf
        model_class: Any = type(hf)
        there, report = model_class.from_pretrained(
            path, config=hf.config, dtype=torch.float32, output_loading_info=True
        )
        missing = sorted(report["missing_keys"])
        unexpected = sorted(report["unexpected_keys"])
        if strict and (missing or unexpected):
            raise ValueError(
                f"{path} is no {model_class.__name__}: it lacks {missing} and also has "
                f"{unexpected}; give another folder, or strict=False"
            )
        weights = there.state_dict()
        for name in missing:
            weights.pop(name, None)
        hf.load_state_dict(weights, strict=False)

    def save_optimizer(self, optimizer: Any, path: str, only_rank0: bool = False) -> None:
        """Writes the optimizer's state, a file for each rank."""
        if only_rank0 or not getattr(optimizer, "state_folder", None):
            raise ValueError(
                f"save_optimizer with only_rank0={only_rank0}: each rank writes its shard of what "
                "fit left, where it trained no adapter; call it after such a fit, with "
                "only_rank0=False"
            )
        shutil.copytree(optimizer.state_folder, path, dirs_exist_ok=True)
        for file in Path(path).glob("rank_*.safetensors"):
            if not (optimizer.state_folder / file.name).exists():
                file.unlink()  # of an earlier save, by more ranks

    def load_optimizer(self, optimizer: Any, path: str) -> None:
        """Has `fit` start with the moments that `save_optimizer` wrote, under any strategy."""
        if not any(Path(path).glob("*.safetensors")):
            raise ValueError(
                f"load_optimizer: {path} has no safetensors file; give a folder that "
                "save_optimizer wrote"
            )
        optimizer.state_folder = Path(path)


class NaiveStrategy(Strategy):
    """One process: this one where there is no GPU."""

    name = "single"

    def __init__(self, offload: bool = False, seed: int = 42) -> None:
        super().__init__(1, offload, seed)


class DDPStrategy(Strategy):
    """Whole copies."""


class FsdpStrategy(Strategy):
    """Shards, as by ZeRO of a stage from 1 to 3."""

    def __init__(self, stage: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.name = f"zero{stage}"
