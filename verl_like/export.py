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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from omegaconf import OmegaConf
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import PreTrainedModel

from verl_like.workers.models.lora import merged_weights, model_buffers, trained_parameters
from verl_like.workers.models.pretrained import save_heads, save_weights

ADAPTER = "adapter_config.json"
"""peft's settings, in a checkpoint that has an adapter alone, and in an export of one."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""peft's name for the file of an adapter's values."""
Tensors = dict[str, Tensor]
"""Parameters or buffers by name."""


def export(
    role_folder: Path,
    out: Path,
    dtype: str | None = None,
    ema: bool = False,
    adapter_only: bool = False,
) -> None:
    """Writes weights, configuration and tokenizer for transformers and vLLM. `out` appears complete
    or not at all.

    The model of a run with LoRA is written with its adapter merged into it.

    Args:
        role_folder: `global_step_N/<role>` of a run.
        out: the new folder.
        dtype: the name of the torch dtype of the weights. None means the one in which the layers
            computed.
        ema: the average of the weights over training, of a run with `actor.ema_decay`, instead of
            the last ones.
        adapter_only: the adapter of a run with LoRA in peft's format, without the model that it
            was trained on.

    Raises:
        ValueError: `role_folder` has no complete checkpoint, or no adapter to write alone, or `out`
            exists or cannot be written.
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
    has_adapter = (checkpoint / ADAPTER).is_file()
    if adapter_only and not has_adapter:
        raise ValueError(
            f"{checkpoint} has no adapter ({ADAPTER}), because its run trained the whole model: "
            "export it without --adapter-only, or train with lora_rank above 0."
        )
    hf = empty_model(checkpoint, dtype)
    if adapter_only:
        settings, trained = read_adapter(checkpoint, hf, ema)
        write = partial(save_adapter, hf, settings, trained)
    elif has_adapter:
        write = partial(save_weights, hf, merged_model(checkpoint, hf, ema))
    else:
        weights = read_weights(checkpoint, hf.dtype, hf.named_parameters(), ema)
        write = partial(save_weights, hf, weights | read_buffers(checkpoint, hf))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{out.name}.partial.", dir=out.parent) as folder:
            incomplete = Path(folder, out.name)
            write(incomplete)
            # The dtype in config.json is that of `hf`, and the settings in ADAPTER are written
            # with the adapter.
            written = shutil.ignore_patterns("*.safetensors", "config.json", ADAPTER)
            shutil.copytree(checkpoint, incomplete, ignore=written, dirs_exist_ok=True)
            incomplete.rename(out)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{out} cannot be written ({error}): make room, or give another folder."
        ) from error


def empty_model(checkpoint: Path, dtype: str | None) -> PreTrainedModel:
    """The checkpoint's model on the meta device. Raises ValueError if its class is not in
    transformers."""
    settings = json.loads((checkpoint / "config.json").read_text())
    (name,) = settings["architectures"]
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


def merged_model(checkpoint: Path, hf: PreTrainedModel, ema: bool) -> Tensors:
    """The parameters of the model that the checkpoint's adapter was trained on, with the adapter in
    them.

    Raises ValueError if that model cannot be read any more, or a part of the adapter is missing.
    """
    settings, trained = read_adapter(checkpoint, hf, ema)
    try:
        return merged_weights(hf, settings, trained, hf.dtype)
    except OSError as error:
        raise ValueError(
            f"{checkpoint} has an adapter of {settings.base_model_name_or_path}, which cannot be "
            f"read ({error}): put that model there."
        ) from error


def read_adapter(checkpoint: Path, hf: PreTrainedModel, ema: bool) -> tuple[LoraConfig, Tensors]:
    """peft's settings of the checkpoint's adapter, and all that was trained, in float32 by name.

    Raises ValueError if a part of the adapter is missing.
    """
    settings = LoraConfig.from_pretrained(str(checkpoint))
    with torch.device("meta"):
        empty = type(hf)(hf.config)
        with_adapter = LoraModel(empty, settings, "default")
        names = trained_parameters(with_adapter.model)
    return settings, read_weights(checkpoint, torch.float32, names, ema)


def save_adapter(hf: PreTrainedModel, settings: LoraConfig, trained: Tensors, folder: Path) -> None:
    """Writes an adapter to a new folder as peft does, in the dtype of `hf`.

    peft's own function gives the names. Further heads, which peft does not read, are written as
    `save_weights` does.

    Args:
        hf: an empty model of the class that the adapter belongs to. It gets an adapter.
        settings: peft's settings of the adapter.
        trained: the values of the adapter and of further heads. The heads are removed.
        folder: the folder to make.
    """
    folder.mkdir()
    values = {name: value.to(hf.dtype) for name, value in trained.items()}
    save_heads(values, folder)
    if hf.can_generate():
        settings.task_type = "CAUSAL_LM"  # AutoPeftModelForCausalLM asks for it
    settings.inference_mode = True
    with torch.device("meta"):
        model = PeftModel(hf, settings)
    of_model = {f"base_model.model.{name}": value for name, value in values.items()}
    # Otherwise peft asks the hub whether the base model has other embeddings.
    in_file = get_peft_model_state_dict(model, of_model, save_embedding_layers=False)
    settings.save_pretrained(str(folder))
    save_file(in_file, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_weights(
    checkpoint: Path, dtype: torch.dtype, parameters: Iterable[tuple[str, Tensor]], ema: bool
) -> Tensors:
    """Returns all weights that are saved, or with `ema` their averages, by name in `dtype`.

    They are at least `parameters`. Others, such as further heads, are not checked. Raises
    ValueError if a file is damaged, or if one of `parameters` or a part of it is missing.
    """
    for file in checkpoint.glob("*.safetensors"):
        try:
            safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is damaged ({error}): export another checkpoint.") from error
    reader = HuggingFaceStorageReader(str(checkpoint))
    saved: Any = reader.read_metadata().state_dict_metadata
    prefix = "optimizer." if ema else "model."
    suffix = ".ema" if ema else ""
    if ema and not any(name.endswith(suffix) for name in saved):
        raise ValueError(
            f"{checkpoint} has no average of the weights: train with "
            "actor_rollout_ref.actor.ema_decay."
        )
    for name, parameter in parameters:
        there = saved.get(f"{prefix}{name}{suffix}")
        num_values = 0
        if there:
            num_values = sum(math.prod(part.sizes) for part in there.chunks)
        if num_values != parameter.numel() or there.size != parameter.size():
            raise ValueError(
                f"{checkpoint} lacks {name} or a part of it: a file is missing; export another "
                "checkpoint."
            )
    values = {}
    weights = {}
    for name, there in saved.items():
        if name.startswith(prefix) and name.endswith(suffix):
            value = torch.empty(there.size, dtype=dtype)
            values[name] = value
            weights[name.removeprefix(prefix).removesuffix(suffix)] = value
    dcp.load(values, storage_reader=reader, no_dist=True)  # fills these tensors
    return weights


def read_buffers(checkpoint: Path, hf: PreTrainedModel) -> Tensors:
    """The model's buffers by name, in the dtypes that they were saved in.

    A checkpoint of an earlier version does not have them. Then they are those of the model that the
    run began with, which is read in float32, and a warning says so. Raises ValueError if that model
    cannot be read any more.
    """
    buffers = dict(model_buffers(hf))
    reader = HuggingFaceStorageReader(str(checkpoint))
    saved: Any = reader.read_metadata().state_dict_metadata
    values = {}
    found = {}
    for name in buffers:
        if there := saved.get(f"model.{name}"):
            value = torch.empty(there.size, dtype=there.properties.dtype)
            values[f"model.{name}"] = value
            found[name] = value
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
    parser.add_argument(
        "--adapter-only", action="store_true", help="the LoRA adapter alone, in peft's format"
    )
    given = parser.parse_args()
    # torch warns that there is only one process, which is intended.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        export(given.role_folder, given.out, given.dtype, given.ema, given.adapter_only)
    except ValueError as error:
        sys.stderr.write(f"verl_like: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
