"""The model of ILQL (Snell et al. 2022, arXiv:2206.11871), a language model with Q and V heads, and
its decoding."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

from verl_like.workers.models.linear_log_prob import linear_log_prob
from verl_like.workers.models.packed_models import PackedModel, changes_of_logits
from verl_like.workers.models.packing import PackedBatch
from verl_like.workers.models.pretrained import HEADS_FILE

# Legend: M scored tokens, D hidden size, H = 2 D, V vocabulary.


def ilql_heads(hf: PreTrainedModel) -> nn.ModuleDict:
    """Loads the heads from the model's folder. If it has none, torch's generator draws new ones.

    - `q1`, `q2`: (..., D) -> (..., V), the value of each token as the next one.
    - `target_q1`, `target_q2`: their running averages, without gradients. They are in float32,
      because a step of an average is smaller than the rounding of bfloat16.
    - `value`: (..., D) -> (..., 1), the value of the text so far.
    """
    embeddings = hf.get_output_embeddings().weight
    vocab_size, size = embeddings.shape
    heads = nn.ModuleDict()
    num_outputs = {"q1": vocab_size, "q2": vocab_size, "value": 1}
    with torch.device(embeddings.device):
        hidden_size = 2 * size
        for name, number in num_outputs.items():
            hidden = nn.Linear(size, hidden_size)
            last = nn.Linear(hidden_size, number, bias=False)
            head = nn.Sequential(hidden, nn.ReLU(), last)
            heads[name] = head.to(embeddings.dtype)
    for name in ("q1", "q2"):
        target = copy.deepcopy(heads[name]).float()
        heads[f"target_{name}"] = target.requires_grad_(False)
    file = heads_file(hf)
    if file.is_file() and not embeddings.is_meta:
        weights = load_file(file)
        heads.load_state_dict(weights)
    return heads


def heads_file(hf: PreTrainedModel) -> Path:
    """Returns the file of the heads in the folder that the model was read from."""
    return Path(hf.name_or_path or "", HEADS_FILE)


class ILQLModel(PackedModel):
    """A language model with Q and V heads, which gives what the losses of ILQL need.

    Q of all tokens of the vocabulary never exists at the same time.
    """

    auto_class = AutoModelForCausalLM

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        self.logit_scale, self.softcap = changes_of_logits(hf)
        self.heads = ilql_heads(hf)

    def forward(self, packed: PackedBatch) -> tuple[Tensor, ...]:
        """Returns seven numbers for each scored token, (M,) float32 each.

        They are the log-probability, Q of both heads, the log-softmax of Q over the vocabulary of
        both heads, the smaller Q of the target heads, and V of the state before the token.
        """
        hidden_MD = self.scored_states(packed)
        labels_M = packed.labels
        policy_VD = self.hf.get_output_embeddings().weight
        log_probs = linear_log_prob(
            hidden_MD, policy_VD, labels_M, scale=self.logit_scale, softcap=self.softcap
        )

        def last_layer(name: str) -> tuple[Tensor, Tensor, Tensor]:
            """Returns a head's last layer: inputs (M, H), weight (V, H), and Q of labels (M,)."""
            head: Any = self.heads[name]
            inputs_MH = head[:-1](hidden_MD)
            weight_VH = head[-1].weight
            products_MH = inputs_MH * weight_VH[labels_M]
            q_M = products_MH.sum(-1, dtype=torch.float32)
            return inputs_MH, weight_VH, q_M

        inputs1_MH, weight1_VH, q1_M = last_layer("q1")
        inputs2_MH, weight2_VH, q2_M = last_layer("q2")
        log_softmax1 = linear_log_prob(inputs1_MH, weight1_VH, labels_M)
        log_softmax2 = linear_log_prob(inputs2_MH, weight2_VH, labels_M)
        with torch.no_grad():
            _inputs, _weight, target_q1_M = last_layer("target_q1")
            _inputs, _weight, target_q2_M = last_layer("target_q2")
            target_q_M = torch.minimum(target_q1_M, target_q2_M)
        values_M1 = self.heads["value"](hidden_MD)
        values_M = values_M1.sum(-1, dtype=torch.float32)
        return *log_probs, q1_M, q2_M, *log_softmax1, *log_softmax2, target_q_M, values_M


class AdvantageWeighting(LogitsProcessor):
    """Decodes by softmax(log pi + beta (Q - V)), with the smaller Q of the target heads.

    It is an argument of `generate` of a model that `main_ilql` has exported, but not of assisted
    generation. Raises ValueError if the model's folder has no heads.
    """

    def __init__(self, model: PreTrainedModel, beta: float) -> None:
        if not heads_file(model).is_file():
            raise ValueError(
                f"{model.name_or_path} has no {HEADS_FILE}: load the model from an export of "
                "main_ilql"
            )
        self.heads = ilql_heads(model).to(model.dtype)
        self.beta = beta
        head = model.get_output_embeddings()
        head.register_forward_pre_hook(self._keep)

    def _keep(self, head: nn.Module, inputs: Any) -> None:
        """Keeps the input of the model's head for the last token."""
        self.hidden = inputs[0][:, -1]

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        """Adds the advantages to the log-softmax of the logits `scores` of the next token, (B,
        V)."""
        q1 = self.heads["target_q1"](self.hidden)
        q2 = self.heads["target_q2"](self.hidden)
        value = self.heads["value"](self.hidden)
        advantages = torch.minimum(q1, q2) - value
        return scores.log_softmax(-1) + self.beta * advantages.float()
