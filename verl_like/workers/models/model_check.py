"""Checks a model before a run starts, without loading its weights.

It checks whether the model's files fit its configuration, and whether its layers compute packed
sequences. All of this happens on torch's meta device, without memory.
"""

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.models.attention import Sequences, packed_attention, settle_sinks
from verl_like.workers.models.lora import add_adapter
from verl_like.workers.models.packed_models import PackedModel, decoder_layers
from verl_like.workers.models.packing import PackedBatch
from verl_like.workers.models.pretrained import (
    empty_model,
    load_hf_config,
    model_setting,
    require_weights,
)
from verl_like.workers.models.sequence_exchange import SequenceExchange

_ATTENTION = "packed_trial"
"""The name by which transformers finds the attention of a trial."""
_LENGTHS = [5, 7]
"""The lengths of the sequences of a trial. If 2 ranks share them, the border of their shares is
within the second."""


def check_model(
    config: ModelConfig,
    model_class: type[PackedModel],
    files: Sequence[Path],
    *,
    key: str,
    makes_head: bool = False,
    sequence_parallel_size: int = 1,
) -> None:
    """Raises ValueError if a role cannot use a model.

    That is so for weights that do not fit the model's configuration, a head or layers that are not
    supported, and if `empty_model` raises.

    Args:
        config: path, overrides of the model's own configuration, adapter.
        model_class: the role's class of the model.
        files: the files of the model's weights.
        key: the configuration key of `config`, for messages.
        makes_head: whether the role makes a new head if the files have none.
        sequence_parallel_size: how many ranks share each batch.
    """
    what = f"{model_setting(key, 'path')}={config.path}"
    hf_config = load_hf_config(config, key=key)
    is_own_code = config.trust_remote_code and getattr(hf_config, "auto_map", None)
    auto_class = model_class.auto_class
    if type(hf_config) not in auto_class._model_mapping and not is_own_code:
        task = auto_class.__name__.removeprefix("AutoModelFor")
        raise ValueError(
            f"{what} is a {hf_config.model_type}, of which transformers has no model for {task}."
        )
    hf = empty_model(config, auto_class, key=key)
    # Files of other formats are pickles, which this does not read.
    if all(file.suffix == ".safetensors" for file in files):
        hf, report = load_shapes(type(hf), hf.config, files)
        mismatched = sorted(report["mismatched_keys"])
        if mismatched:
            name, in_files, expected = mismatched[0]
            raise ValueError(
                f"{what} does not fit its configuration: {name} is {list(in_files)} in its files, "
                f"and {list(expected)} by its config.json with "
                f"{model_setting(key, 'override_config')}; correct these."
            )
        require_weights(report["missing_keys"], hf, config, key=key, makes_head=makes_head)
        add_adapter(hf, config, key)
    settle_sinks(hf, config.attn_implementation)
    parameters = inspect.signature(hf.base_model.forward).parameters
    if "position_ids" not in parameters:
        raise ValueError(
            f"{what}: {type(hf.base_model).__name__} takes no position ids, {_NOT_PACKED}."
        )
    is_recomputed = isinstance(config, TrainedModelConfig) and config.enable_gradient_checkpointing
    if is_recomputed and not hf.supports_gradient_checkpointing:
        setting = model_setting(key, "enable_gradient_checkpointing")
        raise ValueError(
            f"{what}: {type(hf).__name__} has no gradient checkpointing; set {setting}=false."
        )
    try:
        Trial(model_class(hf)).run(sequence_parallel_size)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def load_shapes(
    hf_class: type[PreTrainedModel], hf_config: PretrainedConfig, files: Sequence[Path]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Has transformers load tensors of the files' shapes into a model on the meta device.

    Returns the model, and transformers' report of what is missing or does not fit.
    """
    shapes = {}
    for file in files_that_are_loaded(files):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 (no dictionary)
                shape = content.get_slice(name).get_shape()
                shapes[name] = torch.empty(shape, device="meta")
    loader: Any = hf_class
    with _quiet_transformers():
        return loader.from_pretrained(
            None,
            config=hf_config,
            state_dict=shapes,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )


def files_that_are_loaded(files: Sequence[Path]) -> list[Path]:
    """Returns the files that transformers reads.

    Some folders have the same weights a second time, in another format.
    """
    index_file = files[0].parent / SAFE_WEIGHTS_INDEX_NAME
    names = {SAFE_WEIGHTS_NAME}
    if index_file.is_file():
        index = json.loads(index_file.read_text())
        names = set(index["weight_map"].values())
    return [file for file in files if file.name in names]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Makes a context in which transformers shows neither progress nor warnings."""
    verbosity = logging.get_verbosity()
    has_progress_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(verbosity)
    if has_progress_bar:
        logging.enable_progress_bar()


_NO_INTERFACE = "does not compute attention by transformers' interface for it"
_NOT_PACKED = "so packed sequences would change each other; choose another model"


class Trial:
    """A trial pass of a model on the meta device.

    Its attention computes nothing, but calls of it are counted in each layer.
    """

    def __init__(self, model: PackedModel) -> None:
        AttentionInterface.register(_ATTENTION, packed_attention(self._count))
        hf = model.hf
        with _quiet_transformers():
            hf.set_attn_implementation(_ATTENTION)
        if type(hf)._can_set_experts_implementation():
            # Other implementations need values: which experts were chosen.
            hf.set_experts_implementation("batched_mm")
        self.model = model.train()
        self.num_calls = 0
        self.num_before_layer = 0
        self.without_attention: set[str] = set()
        """The classes of layers that ran without calling attention."""
        for layer in decoder_layers(hf):
            layer.register_forward_pre_hook(self._begin_layer)
            layer.register_forward_hook(self._end_layer)

    def run(self, sequence_parallel_size: int) -> None:
        """Runs the pass.

        Raises ValueError if transformers kept another attention, if packed attention refuses an
        argument, if the pass fails otherwise, or if a layer ran without calling packed attention.
        A model may read values, which meta tensors do not have. Then only the layers that ran
        before are checked.
        """
        hf = self.model.hf
        # If a model does not support it, transformers warns and keeps another implementation.
        if hf.config._attn_implementation != _ATTENTION:
            raise ValueError(f"{type(hf).__name__} {_NO_INTERFACE}, {_NOT_PACKED}.")
        is_complete = True
        try:
            self.model.hidden_states(_trial_batch(sequence_parallel_size))
        except ValueError:
            raise
        except Exception as error:  # the code of a model may raise anything
            if not _is_want_of_values(error):
                raise ValueError(
                    f"a pass over packed sequences fails ({type(error).__name__}: {error})."
                ) from error
            # The pass has ended early, and layers that did not run are not checked. If one calls
            # packed attention for what that does not compute, the run's first pass is refused. If
            # one never calls it, nobody notices.
            is_complete = False
        has_no_call = is_complete and not self.num_calls
        if self.without_attention or has_no_call:
            names = ", ".join(sorted(self.without_attention)) or type(hf).__name__
            raise ValueError(f"{names} {_NO_INTERFACE}, {_NOT_PACKED}.")

    def _count(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Counts a call, as the kernel of the trial's attention."""
        self.num_calls += 1
        return query.transpose(1, 2).contiguous()

    def _begin_layer(self, layer: nn.Module, inputs: Any) -> None:
        self.num_before_layer = self.num_calls

    def _end_layer(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        if self.num_calls == self.num_before_layer:
            self.without_attention.add(type(layer).__name__)


def _is_want_of_values(error: Exception) -> bool:
    """Returns True if an operation failed because meta tensors have no values."""
    return isinstance(error, NotImplementedError) or bool(re.search(r"\bmeta\b", str(error)))


def _trial_batch(sequence_parallel_size: int) -> PackedBatch:
    """Makes a batch of two sequences, or the first rank's share of them, on the meta device."""
    positions_of_sequences = [torch.arange(length) for length in _LENGTHS]
    positions = torch.cat(positions_of_sequences)
    starts = torch.tensor([0, *_LENGTHS]).cumsum(0)
    batch = PackedBatch(
        input_ids=torch.ones_like(positions)[None],
        position_ids=positions[None],
        cu_seqlens=starts.int(),
        sequence_lengths=_LENGTHS,
        scored=torch.arange(1),  # one token, as few as a batch can have
        labels=torch.ones(1, dtype=torch.int64),
        places=torch.zeros(1, dtype=torch.int64),
        num_response_tokens=1,
    )
    if sequence_parallel_size > 1:
        batch = batch.shard(_NoExchange(sequence_parallel_size))
    return batch.on("meta")


class _NoExchange(SequenceExchange):
    """The exchange of the first of several ranks, without the others.

    Results have the right shapes, but not the right values.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0

    def _exchange(self, by_rank: Tensor) -> Tensor:
        return by_rank.contiguous()
