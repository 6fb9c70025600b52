"""Loads Hugging Face models and tokenizers for training, checks them, and writes their files."""

import os
import tempfile
from collections.abc import Collection, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file

from verl_like.workers.config.engine import ForwardFsdpConfig, TrainedFsdpConfig
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.models.attention import choose_attention, settle_sinks
from verl_like.workers.models.experts import GROUPED
from verl_like.workers.models.hub import require_hub_model
from verl_like.workers.models.lora import add_adapter
from verl_like.workers.models.packed_models import decoder_layers

TEACHER_PATH = "actor_rollout_ref.actor.policy_loss.teacher_path"
"""The configuration key of the teacher's path. Its other settings are those of the policy."""

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""The entries of a model's configuration that have to be positive."""

HEADS_FILE = "heads/model.safetensors"
"""The file of further heads, besides the model's own, in a model's folder."""


def model_setting(key: str, name: str) -> str:
    """Returns the full key of a setting of the model that `key` names, for messages."""
    if key == TEACHER_PATH:
        return TEACHER_PATH if name == "path" else f"actor_rollout_ref.model.{name}"
    if key.startswith("reward_models.") and name != "path":
        # Further reward models share all settings but the path.
        return f"reward_model.model.{name}"
    return f"{key}.{name}"


def load_pretrained(
    auto_class: Any,
    config: ModelConfig,
    fsdp: ForwardFsdpConfig | TrainedFsdpConfig,
    *,
    key: str,
    device: str,
    weights: bool,
    new_head_seed: int | None = None,
) -> PreTrainedModel:
    """Makes the model at `config.path`, with packed attention and its adapter.

    A head other than a language model's has one output. Raises ValueError if `load_hf_config` or
    `add_adapter` does, and for weights that are missing at `config.path`, or are not finite.

    Args:
        auto_class: transformers' class for the task, e.g. `AutoModelForCausalLM`.
        config: path, overrides of the model's own configuration, attention implementation.
        fsdp: the dtypes in which parameters are stored and layers compute.
        key: the configuration key of `config`, for messages, e.g. `critic.model`.
        device: the device that attention will run on.
        weights: True reads the weights; False makes a model on torch's meta device, without memory.
        new_head_seed: the seed of a new head, if `config.path` has none, and of an adapter. None
            means that there must be a head, and that an adapter's seed is 0.
    """
    hf_config = load_hf_config(config, key=key)
    if auto_class is not AutoModelForCausalLM:
        hf_config.num_labels = 1
    softcap = getattr(hf_config.get_text_config(), "attn_logit_softcapping", None)
    dtype = getattr(torch, fsdp.dtype)
    attention = choose_attention(config.attn_implementation, device, dtype, softcap)
    options = {
        "dtype": getattr(torch, fsdp.model_dtype),
        "attn_implementation": attention,
        "experts_implementation": config.experts_implementation,
        "trust_remote_code": config.trust_remote_code,
    }
    if not weights:
        with torch.device("meta"):
            model = auto_class.from_config(hf_config, **options)
            settle_sinks(model, config.attn_implementation)
            add_adapter(model, config, key)
            return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(new_head_seed or 0)
        model, report = auto_class.from_pretrained(
            config.expanded_path, config=hf_config, output_loading_info=True, **options
        )
        settle_sinks(model, config.attn_implementation)
        add_adapter(model, config, key)
    makes_head = new_head_seed is not None
    require_weights(report["missing_keys"], model, config, key=key, makes_head=makes_head)
    require_finite(model, config, key=key)
    return model


def require_weights(
    missing: Collection[str],
    model: PreTrainedModel,
    config: ModelConfig,
    *,
    key: str,
    makes_head: bool,
) -> None:
    """Raises ValueError for weights that the model's files lack.

    With `makes_head` the role makes a new head, so that they may lack those of a head.
    """
    new_head = ("score.", "classifier.") if makes_head else ()
    lacking = sorted(name for name in missing if not name.startswith(new_head))
    if lacking:
        raise ValueError(
            f"{model_setting(key, 'path')}={config.path} lacks weights of {type(model).__name__}: "
            f"{lacking}; give a model that was trained for this task."
        )


def require_finite(model: PreTrainedModel, config: ModelConfig, *, key: str) -> None:
    """Raises ValueError for parameters that are NaN or infinite, with their files and names.

    A buffer may be infinite, for example that of a mask, but not NaN. Buffers that are not in the
    model's files are not checked.
    """
    bad = []
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            bad.append(name)
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.isnan().any():
            bad.append(name)
    if not bad:
        return
    path = config.expanded_path
    folder = path
    if not Path(path).is_dir():
        folder = snapshot_download(path, local_files_only=True)
    places = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 (no dictionary)
                if not _is_finite(content.get_tensor(name)):
                    places.append(f"{name} of {file}")
    raise ValueError(
        f"{model_setting(key, 'path')}={config.path} has weights that are NaN or infinite: "
        f"{', '.join(places or bad)}; give a model that is whole."
    )


def _is_finite(tensor: Tensor) -> bool:
    """Returns True if no value is NaN or infinite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    extremes = torch.stack(torch.aminmax(tensor.detach()))  # both are NaN if any value is
    return bool(extremes.isfinite().all())


def empty_model(config: ModelConfig, auto_class: Any, *, key: str) -> PreTrainedModel:
    """Makes the model with its adapter on torch's meta device.

    Raises ValueError if its configuration gives no model, or if `load_hf_config` or `add_adapter`
    does.
    """
    hf_config = load_hf_config(config, key=key)
    if auto_class is not AutoModelForCausalLM:
        hf_config.num_labels = 1
    with torch.device("meta"):
        try:
            model = auto_class.from_config(hf_config, trust_remote_code=config.trust_remote_code)
        except Exception as error:  # a class may raise anything for sizes that do not fit
            path = f"{model_setting(key, 'path')}={config.path}"
            raise ValueError(
                f"{path}: no model can be made of its config.json ({_said(error)})."
            ) from error
        is_grouped = config.experts_implementation == GROUPED
        if is_grouped and not model._can_set_experts_implementation():
            setting = model_setting(key, "override_config.experts_implementation")
            raise ValueError(
                f"{setting}={GROUPED}, but {type(model).__name__} has no experts that "
                "transformers computes so; leave it out."
            )
        add_adapter(model, config, key)
    return model


def load_hf_config(config: ModelConfig, *, key: str) -> PretrainedConfig:
    """Loads the model's own configuration, and applies `override_config`.

    A name that looks like a path is never looked up on the hub. Raises ValueError if there is no
    model at `config.path`, for an override that the model's configuration does not have, for layers
    that do not compute packed sequences, or for dropout in a model that is trained.
    """
    path = config.expanded_path
    path_key = model_setting(key, "path")
    overrides = model_setting(key, "override_config")
    looks_like_path = path.startswith(("/", ".")) or path.count("/") > 1
    config_file = Path(path, "config.json")
    if looks_like_path and not config_file.is_file():
        raise ValueError(
            f"{path_key}={config.path}: there is no model ({config_file.absolute()} does not "
            "exist); give the folder of a Hugging Face model, or a hub name such as "
            "Qwen/Qwen3-0.6B."
        )
    if not Path(path).is_dir():
        require_hub_model(path, f"{path_key}={config.path}")
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the reader may raise anything for a wrong file
        raise ValueError(
            f"{path_key}={config.path}: its config.json cannot be used ({_said(error)})."
        ) from error
    for name, value in config.hf_overrides.items():
        if not hasattr(hf_config, name):
            raise ValueError(
                f"{overrides}.{name}={value!r}: {type(hf_config).__name__} has no attribute "
                f"{name!r}; it has {sorted(hf_config.to_dict())}."
            )
        try:
            setattr(hf_config, name, value)
        except Exception as error:  # transformers checks the types of some attributes
            raise ValueError(f"{overrides}.{name}={value!r}: {_said(error)}") from error
    text_config = hf_config.get_text_config()
    for name in _SIZES:
        size = getattr(text_config, name, None)
        if isinstance(size, int) and size < 1:
            setting = f"{path_key}={config.path}: {name}"
            if name in config.hf_overrides:
                setting = f"{overrides}.{name}"
            raise ValueError(
                f"{setting}={size} in the model's configuration, expected a positive number."
            )
    kinds = getattr(text_config, "layer_types", None) or []
    unsupported = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unsupported:
        raise ValueError(
            f"{path_key}={config.path} has layers of {', '.join(unsupported)}, which packed "
            "sequences do not support; choose a model with full or sliding attention."
        )
    if isinstance(config, TrainedModelConfig):
        _require_no_noise(text_config, f"{path_key}={config.path}", overrides)
    return hf_config


def _require_no_noise(text_config: PretrainedConfig, model: str, overrides: str) -> None:
    """Raises ValueError for dropout or jitter in a model that is trained.

    For the message `model` is key and path, and `overrides` the key of `override_config`.
    """
    noise = {}
    for name, value in vars(text_config).items():
        # Classifiers and summaries are heads of transformers, which are not run.
        if name.startswith(("classifier", "summary")):
            continue
        is_random = "drop" in name or "jitter" in name
        if is_random and type(value) in (int, float) and value > 0:
            noise[name] = value
    if noise:
        found = ", ".join(f"{name}={value}" for name, value in noise.items())
        advice = " and ".join(f"{overrides}.{name}=0.0" for name in noise)
        raise ValueError(
            f"{model} trains with {found}: random outputs make the probability ratio of a policy "
            f"to itself differ from 1; set {advice}."
        )


def check_sequence_length(
    hf_config: PretrainedConfig, length: int, model: str, advice: str
) -> None:
    """Raises ValueError if the model cannot compute sequences of `length` tokens.

    It must have `length` positions, and their embeddings must not depend on other sequences. With
    `longrope` they depend on whether the longest sequence of a pass has more than the original
    positions, so that other sequences of a packed batch would change log-probabilities.

    For the message `model` is key and path, and `advice` says where `length` comes from and how to
    lower it.
    """
    limit = getattr(hf_config, "max_position_embeddings", None) or length
    kind = "positions"
    rope = getattr(hf_config, "rope_parameters", None) or {}
    # Some models have parameters by the kind of layer.
    kinds_of_layers = [rope] if "rope_type" in rope else rope.values()
    for of_layers in filter(None, kinds_of_layers):
        original = of_layers.get("original_max_position_embeddings") or length
        if of_layers.get("rope_type") == "longrope" and original < limit:
            limit = original
            kind = (
                "positions before rope_type=longrope changes them by the longest sequence of a pass"
            )
    if length > limit:
        raise ValueError(f"{model} has {limit} {kind}; {advice}, or choose another model.")


def fetch_weights(config: ModelConfig, *, key: str) -> list[Path]:
    """Returns the files of a model's weights.

    A model of the hub is downloaded into this machine's cache first, so that no rank has to do it
    while others wait. Raises ValueError if there are no weights, or a file is incomplete.
    """
    path = config.expanded_path
    path_key = model_setting(key, "path")
    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    # The second pattern is tried only if no file matches the first.
    for weights in ("*.safetensors", "*model*.bin"):
        folder = path
        try:
            if not Path(path).is_dir():
                folder = snapshot_download(path, allow_patterns=wanted, ignore_patterns="*/*")
        except OSError as error:
            raise ValueError(f"{path_key}={config.path} cannot be downloaded: {error}") from error
        files = sorted(Path(folder).glob(weights))
        for file in files:
            if file.suffix != ".safetensors":
                continue
            try:
                safe_open(file, "pt")  # reads the header, which has the length of the file
            except SafetensorError as error:
                raise ValueError(
                    f"{path_key}={config.path}: {file} is damaged ({error}); copy it anew"
                ) from error
        if files:
            return files
        wanted = ["*.bin", "*.bin.index.json"]
    raise ValueError(
        f"{path_key}={config.path}: {folder} has no weights (*.safetensors or *.bin); where the "
        "hub cannot be reached, download the whole model first: hf download."
    )


def load_tokenizer(config: TrainedModelConfig) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, or that of the policy's `tokenizer_path`.

    The tokenizer is the one in its `tokenizer.json`. The tokenizer classes of transformers are used
    only if there is no such file, because they make normalizer, pre-tokenizer and decoder
    themselves, whatever the file says: DeepSeek-LLM's byte-level tokenizer, which is labelled
    `LlamaTokenizerFast`, would lose its spaces.

    Raises ValueError, which names the file or folder, for files that are not a tokenizer.
    """
    path = os.path.expanduser(config.tokenizer)
    if config.tokenizer != config.path and not Path(path).is_dir():
        require_hub_model(
            path,
            f"model.tokenizer_path={config.tokenizer}",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    file = tokenizer_file(config)
    try:
        if file is None:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        return PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # the reader may raise anything for a wrong file
        # It names tokenizer.json only if that is the damaged file.
        place = _unreadable(file) or path
        raise ValueError(
            f"{place}: no tokenizer can be read there ({_said(error)}); copy "
            "it anew, or set model.tokenizer_path to a folder with a tokenizer of this vocabulary."
        ) from error


def _said(error: Exception) -> str:
    """Returns an error of a library as one line, in which a long message is cut in the middle.

    Its end is kept because it often says what to do.
    """
    text = " ".join(str(error).split())
    if len(text) > 600:
        text = f"{text[:300]} ... {text[-300:]}"
    return f"{type(error).__name__}: {text}"


def _unreadable(file: str | None) -> str | None:
    """Returns `file`, a `tokenizer.json`, if it cannot be read; None if another file is wrong."""
    try:
        if file is not None:
            Tokenizer.from_file(file)
    except Exception:
        return file
    return None


def tokenizer_file(config: TrainedModelConfig) -> str | None:
    """Returns the path of the tokenizer's `tokenizer.json`, or None if it has none."""
    path = os.path.expanduser(config.tokenizer)
    return cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    config: TrainedModelConfig,
    texts: Sequence[str],
    *,
    key: str,
) -> None:
    """Raises ValueError if a run's tokenizer differs from its `tokenizer.json`. Without such a file
    nothing is checked.

    The tokenizer of the run, and the one that it exports, must give the same token ids for `texts`,
    and the same texts after decoding.
    """
    file = tokenizer_file(config)
    if file is None:
        return
    reference = Tokenizer.from_file(file)
    reference.no_truncation()
    reference.no_padding()
    # tokenizer_config.json may name more special tokens than the file.
    added = sorted(tokenizer.added_tokens_decoder.items())
    reference.add_tokens([token for _token_id, token in added])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        # An export has the model's configuration too. For some model types transformers has a
        # tokenizer class, which it uses instead of the one that the folder names.
        load_hf_config(config, key=key).save_pretrained(folder)
        exported = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    readers = {"the run": tokenizer, "an export of it": exported}
    for text in texts:
        ids = reference.encode(text, add_special_tokens=False).ids
        decoded = reference.decode(ids)
        for name, other in readers.items():
            own_ids = other(text, add_special_tokens=False)["input_ids"]
            own_decoded = other.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if own_ids != ids or own_decoded != decoded:
                raise ValueError(
                    f"the tokenizer of {key}, as {name} reads it ({type(other).__name__}), is not "
                    f"that of {file}: {text!r} becomes {own_ids}, not {ids}, and those are "
                    f"decoded as {own_decoded!r}, not {decoded!r}. Training, or a program that "
                    "loads its result, would read other text than the model knows: set "
                    f"{key}.tokenizer_path to a folder that transformers reads as its "
                    "tokenizer.json says."
                )


def save_weights(hf: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes the weights to a folder, for transformers and vLLM.

    The weights of further heads are written and removed by `save_heads`.
    """
    save_heads(weights, folder)
    hf.save_pretrained(folder, state_dict=weights)


def save_heads(weights: dict[str, Tensor], folder: Path) -> None:
    """Takes the weights of heads besides the model's own out of `weights`. If there are any, it
    writes them to `HEADS_FILE` in a folder.

    transformers, peft and vLLM do not read this file.
    """
    heads = {}
    for name in list(weights):
        if name.startswith("heads."):
            heads[name.removeprefix("heads.")] = weights.pop(name)
    if heads:
        file = folder / HEADS_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(heads, file)


def save_settings(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, path: str
) -> None:
    """Writes the configuration, with class and `dtype`, and the tokenizer to a model's folder."""
    config = deepcopy(hf.config)  # a thread may write another folder, with another dtype
    config.dtype = dtype
    config.architectures = [type(hf).__name__]
    config.save_pretrained(path)
    if hf.can_generate():
        hf.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)


def compile_layers(hf: PreTrainedModel) -> None:
    """Compiles the forward of each decoder layer, for any number of tokens.

    Packed attention is not part of the compiled graph.
    """
    for layer in decoder_layers(hf):
        layer.forward = torch.compile(layer.forward, dynamic=True)
