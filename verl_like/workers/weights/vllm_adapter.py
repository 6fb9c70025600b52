"""The adapter in vLLM: the one that all requests have, and fingerprints of what its layers hold.

Requests with an adapter never share a batch with requests without one, which vLLM computes wrongly
on a CPU: it gives the adapter of the last slot to the latter. vLLM imports this module in the
process of its worker; nothing else does.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from verl_like.workers.weights.fingerprints import fingerprint_tensor


class Adapter:
    """What was loaded last into vLLM's `manager` of a model's adapters."""

    def __init__(self, manager: Any, adapter_id: int) -> None:
        self.manager = manager
        self.adapter_id = adapter_id
        self.sources: dict[tuple[str, bool], str] = {}
        """The Hugging Face name of each tensor, by the name of vLLM's layer and whether it is A."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Puts an adapter, whose B has the factor alpha / rank, in the place of the one before.

        Requests in flight go on with it.
        """
        # Copies: what is sent lies in memory that the trainer writes again.
        values = {name: tensor.clone() for name, tensor in tensors}
        names = {name: name.replace(".default.", ".") for name in values}
        mapper = getattr(self.manager.model, "hf_to_vllm_mapper", None)
        mapper = mapper.get_rename_mapper() if mapper else None
        self.sources = {
            parse_fine_tuned_lora_name(own, mapper): name for name, own in names.items()
        }
        rank = next(len(value) for name, value in values.items() if ".lora_A." in name)
        adapter = LoRAModel.from_lora_tensors(
            self.adapter_id,
            {names[name]: value for name, value in values.items()},
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=self.manager.lora_config.lora_dtype,
            weights_mapper=mapper,
        )
        self.manager.remove_adapter(self.adapter_id)
        self.manager.add_adapter(adapter)
        self.manager.activate_adapter(self.adapter_id)

    def fingerprints(self) -> dict[str, int]:
        """Fingerprints by Hugging Face name of what the layers compute with; zeros, as in padding,
        add nothing."""
        slot = self.manager.lora_index_to_id.index(self.adapter_id)
        found = {}
        for module_name, module in self.manager.modules.items():
            parts = self.manager.packed_modules.get(module_name, [module_name])
            for is_a, stacked in ((True, module.lora_a_stacked), (False, module.lora_b_stacked)):
                for part, values in zip(parts, stacked, strict=True):
                    fingerprint = fingerprint_tensor(values[slot, 0])
                    name = self.sources.get((part, is_a))
                    if name or fingerprint:  # what is there unasked for is reported by vLLM's name
                        found[name or part] = fingerprint
        return found
