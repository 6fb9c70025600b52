"""The adapter in vLLM: loads the one that all requests have, and takes fingerprints of what vLLM's
layers hold of it.

Requests with an adapter never share a batch with requests without one, which vLLM computes wrongly
on a CPU: it gives the adapter of the last slot to the latter. vLLM imports this module in the
process of its worker; nothing else does.
"""

from collections.abc import Iterable
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from verl_like.workers.weights.exports import NamedTensor
from verl_like.workers.weights.fingerprints import fingerprint_tensor

_experts_config: Any = FusedMoEConfig
_post_init = _experts_config.__post_init__


def _without_adapters_of_experts(config: Any) -> None:
    """Does `FusedMoEConfig.__post_init__`, with which experts are computed as without adapters.

    Where any module may have an adapter, vLLM takes a Triton kernel for experts, which a CPU lacks.
    Adapters of experts are refused, see `add_adapter`.
    """
    config.is_lora_enabled = False
    _post_init(config)


_experts_config.__post_init__ = _without_adapters_of_experts


class Adapter:
    """What was loaded last into vLLM's `manager` of a model's adapters, under the number
    `adapter_id`."""

    def __init__(self, manager: Any, adapter_id: int) -> None:
        self.manager = manager
        self.adapter_id = adapter_id
        self.sources: dict[tuple[str, bool], str] = {}
        """The Hugging Face name of each tensor, by the name of vLLM's layer and True for A, False
        for B."""

    def load(self, tensors: Iterable[NamedTensor]) -> None:
        """Replaces the adapter by `tensors`, whose B has the factor alpha / rank already.

        Requests in flight go on with it.
        """
        mapper = getattr(self.manager.model, "hf_to_vllm_mapper", None)
        renaming = mapper.get_rename_mapper() if mapper else None
        values = {}
        ranks = set()
        self.sources = {}
        for name, tensor in tensors:
            own_name = name.replace(".default.", ".")
            # A copy, since what is sent lies in memory that the trainer writes again.
            values[own_name] = tensor.clone()
            layer_and_side = parse_fine_tuned_lora_name(own_name, renaming)
            self.sources[layer_and_side] = name
            if ".lora_A." in own_name:
                ranks.add(len(tensor))
        (rank,) = ranks  # all layers have the same
        # So that vLLM multiplies by a factor of 1.
        settings = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
        adapter = LoRAModel.from_lora_tensors(
            self.adapter_id,
            values,
            settings,
            device="cpu",
            dtype=self.manager.lora_config.lora_dtype,
            weights_mapper=renaming,
        )
        self.manager.remove_adapter(self.adapter_id)
        self.manager.add_adapter(adapter)
        self.manager.activate_adapter(self.adapter_id)

    def fingerprints(self) -> dict[str, int]:
        """Returns fingerprints by Hugging Face name of what the layers compute with; zeros, as in
        padding, add nothing."""
        slot = self.manager.lora_index_to_id.index(self.adapter_id)
        found = {}
        for module_name, module in self.manager.modules.items():
            parts = self.manager.packed_modules.get(module_name, [module_name])
            for is_a in (True, False):
                stacked = module.lora_a_stacked if is_a else module.lora_b_stacked
                for part, values in zip(parts, stacked, strict=True):
                    fingerprint = fingerprint_tensor(values[slot, 0])
                    name = self.sources.get((part, is_a))
                    # What is there without being sent is reported by vLLM's name.
                    if name or fingerprint:
                        found[name or part] = fingerprint
        return found
