"""Training on examples in float64, written from the papers and the documentation: the independent
reference.

One conversation at a time, without padding or micro-batches. Imports nothing from `verl_like`.
Settings are a flat mapping from each key's full path to its value, None or missing where another
key decides.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import examples_world as examples
import numpy as np
import torch
from safetensors.torch import load_file
from step_llama import Llama
from step_reference import Learner, Settings, Trained
from torch.nn.functional import logsigmoid

Means = dict[str, tuple[torch.Tensor, int]]
"""Of each metric the sum, and of how many numbers."""
Part = tuple[torch.Tensor, int, Means]
"""Of a row: the sum of its losses, their number, and its metrics."""


def train(kind: str, settings: Settings, steps: int) -> Trained:
    """Runs training steps, and where there are validation rows one validation after them."""
    run = KINDS[kind](kind, settings)
    metrics = [run.step(number) for number in range(steps)]
    if settings["data.val_files"]:
        metrics.append(run.validate())
    parameters = {
        name: weight.detach() for name, weight in (run.model.parameters | run.targets).items()
    }
    return Trained(metrics, {"model": run.learner.gradients}, {"model": parameters})


class Run:
    """A language model that is fine-tuned; subclasses have other losses."""

    with_pairs = False

    def __init__(self, kind: str, settings: Settings) -> None:
        self.kind, self.settings = kind, settings
        self.model = Llama(settings["model.path"], settings["model.override_config"])
        self.targets: dict[str, torch.Tensor] = {}
        self.rows = self.read("train")
        self.size = settings["data.train_batch_size"]
        self.steps_per_epoch = len(self.rows) // self.size
        total = (
            settings["trainer.total_training_steps"]
            or self.steps_per_epoch * settings["trainer.total_epochs"]
        )
        self.learner = Learner(self.model, settings, "training", total)

    def read(self, part: str) -> list[tuple[dict, list[examples.Tokens]]]:
        """The rows of a file with their conversations, none longer than the limit."""
        settings, rows = self.settings, []
        mark = settings["data.apply_chat_template_kwargs"].get("mark", "=")
        records = [
            json.loads(line)
            for line in Path(settings[f"data.{part}_files"]).read_text().splitlines()
        ]
        limit = settings[f"data.{part}_max_samples"]
        for record in records if limit == -1 else records[:limit]:
            of_pair = examples.tokens_of_pair(record, mark) if self.with_pairs else None
            conversations = of_pair or [examples.tokens_of_talk(record, mark)]
            longest = settings["data.max_length"]
            if settings["data.overlong"] == "drop" and any(
                len(ids) > longest for ids, _ in conversations
            ):
                continue
            rows.append(
                (record, [(ids[:longest], learned[:longest]) for ids, learned in conversations])
            )
        return rows

    def step(self, number: int) -> dict[str, float]:
        """A training step, which is one optimizer step; returns its metrics."""
        epoch, place = divmod(number, self.steps_per_epoch)
        order = np.arange(len(self.rows))
        if self.settings["data.shuffle"]:
            order = np.random.RandomState([self.settings["trainer.seed"], epoch]).permutation(order)
        rows = [
            self.rows[index]
            for index in order[place * self.size : (place + 1) * self.size].tolist()
        ]
        loss, means = self.loss(rows)
        names, weights = zip(*self.model.parameters.items(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(loss, weights), strict=True))
        self.learner.gradients.append(gradients)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        limit, lr = self.settings["training.grad_clip"], self.learner.lr
        self.learner.apply(gradients, limit / max(limit, norm))
        self.learner.updates += 1
        self.after_step()
        num_tokens = sum(
            sum(learned[1:]) for _, conversations in rows for _, learned in conversations
        )
        own = {
            "loss": float(loss.detach()),
            "grad_norm": norm,
            "lr": lr,
            "skipped_steps": 0,
            "num_tokens": num_tokens,
        }
        return {f"{self.kind}/{name}": value for name, value in (own | means).items()} | {
            "training/epoch": epoch
        }

    def validate(self) -> dict[str, float]:
        """The means over the validation rows."""
        with torch.no_grad():
            loss, means = self.loss(self.read("val"))
        found = {"loss": float(loss)} | means
        return {
            f"val-{'core' if n in ('loss', 'accuracy') else 'aux'}/{n}": found[n] for n in found
        }

    def loss(
        self, rows: list[tuple[dict, list[examples.Tokens]]]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The mean over the tokens, or the pairs, of all rows, and the means of the metrics."""
        parts = [self.part(record, *conversations) for record, conversations in rows]
        losses, counts, of_rows = zip(*parts, strict=True)
        means = {
            name: float(sum(of_row[name][0].detach() for of_row in of_rows))
            / sum(of[name][1] for of in of_rows)
            for name in of_rows[0]
        }
        return torch.stack(losses).sum() / sum(counts), means

    def part(self, record: dict, conversation: examples.Tokens) -> Part:
        """-log p of each learned token."""
        log_probs = self.log_probs(self.model, conversation)
        return -log_probs.sum(), len(log_probs), {}

    def log_probs(self, model: Llama, conversation: examples.Tokens) -> torch.Tensor:
        """Of each learned token but a first one."""
        ids, learned = conversation
        logits_TV = model.hidden_states(ids) @ model.parameters["lm_head.weight"].T
        places = [t for t in range(1, len(ids)) if learned[t]]
        return torch.log_softmax(logits_TV, dim=-1)[
            [t - 1 for t in places], [ids[t] for t in places]
        ]

    def after_step(self) -> None:
        """What follows the optimizer step."""


def means_of_pair(chosen: torch.Tensor, rejected: torch.Tensor) -> Means:
    """Of the rewards of both answers, with p = sigmoid(r_c - r_r)."""
    margin = chosen - rejected
    values = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": margin,
        "accuracy": (margin > 0).double(),
        "confidence": margin.abs().sigmoid(),
        "brier": (1 - margin.sigmoid()) ** 2,
    }
    return {name: (value, 1) for name, value in values.items()}


class RewardRun(Run):
    """A reward model: -log sigmoid(r_c - r_r - margin) (arXiv:2203.02155, eq. 1; 2307.09288, eq.
    2)."""

    with_pairs = True

    def part(self, record: dict, chosen: examples.Tokens, rejected: examples.Tokens) -> Part:
        head = self.model.parameters["score.weight"][0]
        r_c, r_r = (self.model.hidden_states(ids)[-1] @ head for ids, _ in (chosen, rejected))
        return -logsigmoid(r_c - r_r - record.get("margin", 0.0)), 1, means_of_pair(r_c, r_r)


class PreferenceRun(Run):
    """DPO (arXiv:2305.18290, eq. 7), conservative with label_smoothing, and IPO (2310.12036, eq.
    17)."""

    with_pairs = True

    def __init__(self, kind: str, settings: Settings) -> None:
        super().__init__(kind, settings)
        self.reference = Llama(settings["model.path"], settings["model.override_config"])

    def part(self, record: dict, chosen: examples.Tokens, rejected: examples.Tokens) -> Part:
        beta, smoothing = self.settings["training.beta"], self.settings["training.label_smoothing"]
        ratio_c, ratio_r = (
            self.log_probs(self.model, each).sum()
            - self.log_probs(self.reference, each).sum().detach()
            for each in (chosen, rejected)
        )
        difference = ratio_c - ratio_r
        loss = {
            "dpo": -(1 - smoothing) * logsigmoid(beta * difference)
            - smoothing * logsigmoid(-beta * difference),
            "ipo": (difference - 1 / (2 * beta)) ** 2,
        }
        return (
            loss[self.settings["training.loss_type"]],
            1,
            means_of_pair(beta * ratio_c, beta * ratio_r),
        )


class ValueRun(Run):
    """ILQL (arXiv:2206.11871)."""

    def __init__(self, kind: str, settings: Settings) -> None:
        super().__init__(kind, settings)
        for name, weight in load_file(
            Path(settings["model.path"], "heads/model.safetensors")
        ).items():
            is_target = name.startswith("target_")
            (self.targets if is_target else self.model.parameters)[f"heads.{name}"] = (
                weight.double().requires_grad_(not is_target)
            )
        self.learner = Learner(self.model, settings, "training", self.learner.total_steps)

    def head(self, name: str, hidden_ND: torch.Tensor) -> torch.Tensor:
        weights = self.model.parameters | self.targets
        inner = (
            hidden_ND @ weights[f"heads.{name}.0.weight"].T + weights[f"heads.{name}.0.bias"]
        ).relu()
        return inner @ weights[f"heads.{name}.2.weight"].T

    def part(self, record: dict, conversation: examples.Tokens) -> Part:
        ids, learned = conversation
        setting = {
            name: self.settings[f"training.{name}"] for name in ("gamma", "expectile", "awac_beta")
        }
        places = [t for t in range(1, len(ids)) if learned[t]]
        hidden_MD = self.model.hidden_states(ids)[[t - 1 for t in places]]
        labels, count = [ids[t] for t in places], len(places)
        log_p_M = torch.log_softmax(hidden_MD @ self.model.parameters["lm_head.weight"].T, -1)[
            range(count), labels
        ]
        values_M = self.head("value", hidden_MD)[:, 0]
        target_q_M = torch.minimum(
            *(self.head(name, hidden_MD)[range(count), labels] for name in TARGETS)
        ).detach()
        later = [*values_M[1:].detach().tolist(), 0.0]
        y_M = torch.tensor([setting["gamma"] * value for value in later], dtype=torch.float64)
        y_M[-1] += record["score"]
        td, cql = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        for name in ("q1", "q2"):
            q_MV = self.head(name, hidden_MD)
            td = td + (q_MV[range(count), labels] - y_M) ** 2
            cql = cql + q_MV.logsumexp(-1) - q_MV[range(count), labels]
        u_M = target_q_M - values_M
        value = (setting["expectile"] - (u_M < 0).double()).abs() * u_M**2
        weight_M = (setting["awac_beta"] * u_M.detach()).exp().clamp(max=100)
        terms = {
            "td_loss": td,
            "value_loss": value,
            "cql_loss": cql,
            "lm_loss": -weight_M * log_p_M,
        }
        coefficients = self.settings["training.cql_coef"], self.settings["training.lm_coef"]
        total = td + value + coefficients[0] * cql + coefficients[1] * terms["lm_loss"]
        means = terms | {"target_q": target_q_M, "value": values_M}
        return (
            total.sum(),
            count,
            {name: (of_tokens.sum(), count) for name, of_tokens in means.items()},
        )

    @torch.no_grad()
    def after_step(self) -> None:
        for name, target in self.targets.items():
            target += self.settings["training.polyak"] * (
                self.model.parameters[name.replace("target_", "")] - target
            )


TARGETS = ("target_q1", "target_q2")
KINDS: dict[str, Callable[[str, Settings], Run]] = {
    "sft": Run,
    "rm": RewardRun,
    "dpo": PreferenceRun,
    "ilql": ValueRun,
}
