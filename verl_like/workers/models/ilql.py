"""The model of ILQL (Snell et al. 2022, arXiv:2206.11871): a language model with Q and V heads, and
its decoding."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

from verl_like.workers.models.linear_log_prob import linear_log_prob
from verl_like.workers.models.packed_models import PackedModel, changes_of_logits
from verl_like.workers.models.packing import PackedBatch
from verl_like.workers.models.pretrained import HEADS_FILE

# Legend: M scored tokens, D hidden size, H = 2 D, V vocabulary.


def ilql_heads(hf: PreTrainedModel) -> nn.ModuleDict:
    """The heads in the folder of the model; torch's generator draws new ones where it has none.

    `q1`, `q2`: (..., D) -> (..., V), the value of each token as the next one. `target_q1`,
    `target_q2`: their running averages, without gradients, and in float32, since a step of an
    average is below the rounding of bfloat16. `value`: (..., D) -> (..., 1), that of the text so
    far.
    """
    embeddings = hf.get_output_embeddings().weight
    num_tokens, size = embeddings.shape
    heads = nn.ModuleDict()
    with torch.device(embeddings.device):
        for name, num_outputs in {"q1": num_tokens, "q2": num_tokens, "value": 1}.items():
            layers = (
                nn.Linear(size, 2 * size),
                nn.ReLU(),
                nn.Linear(2 * size, num_outputs, bias=False),
            )
            heads[name] = nn.Sequential(*layers).to(embeddings.dtype)
    for name in ("q1", "q2"):
        heads[f"target_{name}"] = copy.deepcopy(heads[name]).float().requires_grad_(False)
    file = heads_file(hf)
    if file.is_file() and not embeddings.is_meta:
        heads.load_state_dict(load_file(file))
    return heads


def heads_file(hf: PreTrainedModel) -> Path:
    """The file of the heads in the folder that the model was read from."""
    return Path(hf.name_or_path or "", HEADS_FILE)


class ILQLModel(PackedModel):
    """What the losses of ILQL need of each response token, without the Q of all other tokens."""

    auto_class = AutoModelForCausalLM

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        self.logit_scale, self.softcap = changes_of_logits(hf)
        self.heads = ilql_heads(hf)

    def forward(self, packed: PackedBatch) -> tuple[torch.Tensor, ...]:
        """(M,) float32 each: log-probability; Q of both heads; its log-softmax over the vocabulary,
        of both; the lesser Q of the target heads; V of the state before the token."""
        hidden_MD = self.hidden_states(packed)[packed.scored]
        labels_M = packed.labels
        policy_VD = self.hf.get_output_embeddings().weight
        log_probs = linear_log_prob(
            hidden_MD, policy_VD, labels_M, scale=self.logit_scale, softcap=self.softcap
        )

        def last_layer(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Its inputs and weights, and its outputs for the labels: (M, H), (V, H), (M,)."""
            head: Any = self.heads[name]
            inputs_MH = head[:-1](hidden_MD)
            weight_VH = head[-1].weight
            return (
                inputs_MH,
                weight_VH,
                (inputs_MH * weight_VH[labels_M]).sum(-1, dtype=torch.float32),
            )

        layers = last_layer("q1"), last_layer("q2")
        log_softmax = [linear_log_prob(inputs, weight, labels_M)[0] for inputs, weight, _ in layers]
        with torch.no_grad():
            target_q_M = torch.minimum(last_layer("target_q1")[2], last_layer("target_q2")[2])
        values_M = self.heads["value"](hidden_MD).sum(-1, dtype=torch.float32)
        return *log_probs, *(q_M for _, _, q_M in layers), *log_softmax, target_q_M, values_M


class AdvantageWeighting(LogitsProcessor):
    """Decodes by softmax(log pi + beta (Q - V)), with the lesser Q of the target heads, in
    `generate` of a model that `main_ilql` exported; not for assisted generation. Raises ValueError
    if the model's folder has no heads.
    """

    def __init__(self, model: PreTrainedModel, beta: float) -> None:
        if not heads_file(model).is_file():
            raise ValueError(
                f"{model.name_or_path} has no {HEADS_FILE}: load the model from an export of "
                "main_ilql"
            )
        self.heads = ilql_heads(model).to(model.dtype)
        self.beta = beta
        model.get_output_embeddings().register_forward_pre_hook(self._keep)

    def _keep(self, head: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.hidden = inputs[0][:, -1]

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        """(B, V) logits of the next token -> the same with the advantages."""
        q1, q2, value = (
            self.heads[name](self.hidden) for name in ("target_q1", "target_q2", "value")
        )
        return scores.log_softmax(-1) + self.beta * (torch.minimum(q1, q2) - value).float()
