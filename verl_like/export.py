"""Makes a Hugging Face folder of a model in a checkpoint: `python -m verl_like.export
CHECKPOINT_ROLE_FOLDER OUT`.

One process does it without Ray, whatever the number of ranks that wrote the checkpoint. It reads
the weights but no state of the optimizer, and has the model in memory once.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from omegaconf import OmegaConf
from peft import LoraConfig, LoraModel
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import PreTrainedModel

from verl_like.workers.models.lora import merged_weights, model_buffers, trained_parameters
from verl_like.workers.models.pretrained import save_weights

ADAPTER = "adapter_config.json"
"""The file with peft's settings, in a checkpoint that has only an adapter."""
Tensors = dict[str, torch.Tensor]
"""Parameters or buffers by name."""


def export(role_folder: Path, out: Path, dtype: str | None = None, ema: bool = False) -> None:
    """Writes weights, configuration and tokenizer for transformers and vLLM. `out` appears complete
    or not at all.

    Args:
        role_folder: `global_step_N/<role>` of a run.
        out: the new folder.
        dtype: the name of the torch dtype of the weights. None means the one in which the layers
            computed.
        ema: True for the average of the weights over training instead of the last weights. The run
            must have had `actor.ema_decay`.

    Raises:
        ValueError: `role_folder` has no complete checkpoint, or `out` exists or cannot be written.
    """
    checkpoint = role_folder / "checkpoint"
    has_weights = any(checkpoint.glob("*.safetensors"))
    if not (has_weights and (checkpoint / "config.json").is_file()):
        raise ValueError(
            f"{role_folder} has no checkpoint (checkpoint/*.safetensors and "
            "checkpoint/config.json): give the folder of a role, such as "
            "outputs/verl_like/ppo/latest/global_step_120/actor."
        )
    if out.exists():
        raise ValueError(f"{out} exists: remove it, or give a folder that does not.")
    hf = empty_model(checkpoint, dtype)
    if (checkpoint / ADAPTER).is_file():
        weights = weights_of_adapter(checkpoint, hf, ema)
    else:
        weights = read_weights(checkpoint, hf.dtype, hf.named_parameters(), ema)
        weights |= read_buffers(checkpoint, hf)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial.", dir=out.parent) as folder:
            partial = Path(folder, out.name)
            save_weights(hf, weights, partial)
            # The dtype in config.json is that of `hf`.
            settings = shutil.ignore_patterns("*.safetensors", "config.json", ADAPTER)
            shutil.copytree(checkpoint, partial, ignore=settings, dirs_exist_ok=True)
            partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{out} cannot be written ({error}): make room, or give another folder."
        ) from error


def empty_model(checkpoint: Path, dtype: str | None) -> PreTrainedModel:
    """The checkpoint's model on the meta device. Raises ValueError if its class is not in
    transformers."""
    (name,) = json.loads((checkpoint / "config.json").read_text())["architectures"]
    model_class: Any = getattr(transformers, name, None)
    if model_class is None:
        raise ValueError(
            f"{checkpoint} is of a {name}, which transformers {transformers.__version__} does not "
            "have. A model with code of its own is written at the end of a run alone, as "
            "huggingface/."
        )
    config = model_class.config_class.from_pretrained(checkpoint)
    torch_dtype = getattr(torch, dtype) if dtype else config.dtype
    with torch.device("meta"):
        return model_class(config).to(torch_dtype)


def weights_of_adapter(checkpoint: Path, hf: PreTrainedModel, ema: bool) -> Tensors:
    """The parameters of the model that the checkpoint's adapter was trained on, with the adapter
    merged into them.

    Raises ValueError if that model cannot be read any more, or a part of the adapter is missing.
    """
    settings = LoraConfig.from_pretrained(str(checkpoint))
    with torch.device("meta"):
        base = type(hf)(hf.config)
        with_adapter = LoraModel(base, settings, "default")
    parameters = trained_parameters(with_adapter.model)
    adapter = read_weights(checkpoint, torch.float32, parameters, ema)
    try:
        return merged_weights(hf, settings, adapter, hf.dtype)
    except OSError as error:
        raise ValueError(
            f"{checkpoint} has an adapter of {settings.base_model_name_or_path}, which cannot be "
            f"read ({error}): put that model there."
        ) from error


def read_weights(
    checkpoint: Path, dtype: torch.dtype, parameters: Iterable[tuple[str, torch.Tensor]], ema: bool
) -> Tensors:
    """The whole values of `parameters` by name, in `dtype`. Raises ValueError if a file is damaged,
    or a parameter or a part of it is missing."""
    for file in checkpoint.glob("*.safetensors"):
        try:
            safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is damaged ({error}): export another checkpoint.") from error
    reader = HuggingFaceStorageReader(str(checkpoint))
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    prefix = "optimizer." if ema else "model."
    suffix = ".ema" if ema else ""
    if ema and not any(name.endswith(suffix) for name in saved):
        raise ValueError(
            f"{checkpoint} has no average of the weights: train with "
            "actor_rollout_ref.actor.ema_decay."
        )
    for name, parameter in parameters:
        there: Any = saved.get(f"{prefix}{name}{suffix}")
        num_values = sum(math.prod(part.sizes) for part in there.chunks) if there else 0
        if num_values != parameter.numel() or there.size != parameter.size():
            raise ValueError(
                f"{checkpoint} lacks {name} or a part of it: a file is missing; export another "
                "checkpoint."
            )
    values = {}
    weights = {}
    for name, there in saved.items():
        if name.startswith(prefix) and name.endswith(suffix):
            values[name] = torch.empty(there.size, dtype=dtype)
            weights[name.removeprefix(prefix).removesuffix(suffix)] = values[name]
    dcp.load(values, storage_reader=reader, no_dist=True)  # fills these tensors
    return weights


def read_buffers(checkpoint: Path, hf: PreTrainedModel) -> Tensors:
    """The model's buffers by name, in the dtypes that they were saved in.

    A checkpoint of an earlier version does not have them. Then they are those of the model that the
    run began with, and a warning says so. Raises ValueError if that model cannot be read any more.
    """
    buffers = dict(model_buffers(hf))
    reader = HuggingFaceStorageReader(str(checkpoint))
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    values = {}
    found = {}
    for name in buffers:
        if there := saved.get(f"model.{name}"):
            found[name] = torch.empty(there.size, dtype=there.properties.dtype)
            values[f"model.{name}"] = found[name]
    dcp.load(values, storage_reader=reader, no_dist=True)  # fills these tensors
    lacking = sorted(buffers.keys() - found.keys())
    if not lacking:
        return found
    message = f"{checkpoint} is of an earlier version and lacks the buffers {', '.join(lacking)}"
    try:
        path = base_model(checkpoint)
        base = type(hf).from_pretrained(path, config=hf.config, dtype=torch.float32)
    except OSError as error:
        raise ValueError(
            f"{message}, and the model that the run began with, which has them, cannot be read "
            f"({error}): put it back, or go on with the run for a step and export its next "
            "checkpoint."
        ) from error
    warnings.warn(f"{message}: they are those of {path}.", stacklevel=2)
    buffers_of_base = dict(model_buffers(base))
    return found | {name: buffers_of_base[name] for name in lacking}


def base_model(checkpoint: Path) -> str:
    """The path of the model that the role of the checkpoint began with. Raises OSError if the run's
    config.yaml cannot be read."""
    role_folder = checkpoint.parent
    key_of_role = {"actor": "actor_rollout_ref.model", "critic": "critic.model"}
    key = key_of_role.get(role_folder.name, "model")
    config = OmegaConf.load(role_folder.parent.parent / "config.yaml")
    path = OmegaConf.select(config, f"{key}.path")
    return str(Path(path).expanduser())


def main() -> int:
    """Returns the exit code: 0 done, 2 input refused."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_like.export",
        description="Makes a Hugging Face folder of a model in a checkpoint",
    )
    parser.add_argument(
        "role_folder", type=Path, metavar="CHECKPOINT_ROLE_FOLDER", help="global_step_N/<role>"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="default: in which the layers computed"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the average of the weights (actor.ema_decay)"
    )
    given = parser.parse_args()
    # torch warns that there is only one process, which is intended.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        export(given.role_folder, given.out, given.dtype, given.ema)
    except ValueError as error:
        sys.stderr.write(f"verl_like: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
