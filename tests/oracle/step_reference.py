"""The whole training step in float64, written from the papers and the documentation: the
independent reference.

One sequence at a time, without padding, sharding or micro-batches; gradients by torch's autograd.
Imports nothing from `verl_like`. Settings are a flat mapping from each key's full path to its
value, None or missing where another key decides.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import step_corrections as corrections
import step_world as world
import torch
from step_llama import Llama, Parameters
from step_terms import kl_estimate, ptx_loss

Settings = dict[str, object]
ACTOR = "actor_rollout_ref.actor"
AGGREGATION = f"{ACTOR}.loss_agg_mode"
"""Where it is not given, that of the policy loss, which is token-mean for those here."""
RESPONSE_LENGTH = "actor_rollout_ref.rollout.response_length"

FOLLOWS = {
    f"{ACTOR}.clip_ratio_low": f"{ACTOR}.clip_ratio",
    f"{ACTOR}.clip_ratio_high": f"{ACTOR}.clip_ratio",
    "critic.ppo_mini_batch_size": f"{ACTOR}.ppo_mini_batch_size",
    "critic.ppo_epochs": f"{ACTOR}.ppo_epochs",
    "critic.loss_agg_mode": AGGREGATION,
    RESPONSE_LENGTH: "data.max_response_length",
}
"""Keys that have the value of another one unless they are given."""

NOT_COMPARED = re.compile("(^|/)perf/|^global_seqlen/")
"""Metrics of speed, memory and balance."""


@dataclass
class Row:
    """One response to a prompt, and what is known of it. Lists have an entry for each token that
    counts."""

    group: int
    """Number of the prompt."""
    number: int
    """Row of the batch."""
    prompt: list[int]
    token_ids: list[int]
    positions: list[int]
    """Of the tokens that count, within the response."""
    rollout: torch.Tensor
    score: float | None
    """None: left out."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of the rule and of each reward model, by column."""
    known: dict[str, torch.Tensor] = field(default_factory=dict)
    """old_log_probs, entropy, ref_log_prob, values, rewards, advantages, returns."""


@dataclass
class Trained:
    """What training did."""

    metrics: list[dict[str, float]]
    """Of each step."""
    gradients: dict[str, list[Parameters]]
    """Of each optimizer step of actor and critic, before they are clipped."""
    parameters: dict[str, Parameters]
    """Of actor and critic in the end."""


def train(settings: Settings, steps: int) -> Trained:
    """Runs training steps on the prompts of the world, in file order."""
    run = Run(settings)
    metrics = [run.step(number) for number in range(1, steps + 1)]
    trained = {"actor": run.actor} | ({"critic": run.critic} if run.critic else {})
    return Trained(
        metrics,
        {role: learner.gradients for role, learner in trained.items()},
        {
            role: {n: p.detach() for n, p in learner.model.parameters.items()}
            for role, learner in trained.items()
        },
    )


class Run:
    """A run between steps."""

    def __init__(self, settings: Settings) -> None:
        if settings[AGGREGATION] is None:
            settings = settings | {AGGREGATION: "token-mean"}
        settings = settings | {
            key: settings[other] for key, other in FOLLOWS.items() if settings[key] is None
        }
        self.settings = settings
        path, changes = (
            settings["actor_rollout_ref.model.path"],
            settings["actor_rollout_ref.model.override_config"],
        )
        limit = settings["data.train_max_samples"]
        self.num_prompts = len(world.PROMPTS) if limit == -1 else limit
        self.steps_per_epoch = self.num_prompts // settings["data.train_batch_size"]
        total = (
            settings["trainer.total_training_steps"]
            or self.steps_per_epoch * settings["trainer.total_epochs"]
        )
        # The actor's schedule counts the steps that train it.
        self.actor = Learner(
            Llama(path, changes), settings, ACTOR, total - settings["trainer.critic_warmup"]
        )
        self.reference = Llama(path, changes)
        model, models = "reward_model.model", dict(settings["reward_models"])
        if settings["reward_model.enable"]:
            models[""] = {
                "path": settings[f"{model}.path"],
                "weight": settings["reward_model.weight"],
            }
        self.reward_models = {
            f"rm_scores/{name}".removesuffix("/"): (
                Llama(own["path"], settings[f"{model}.override_config"]),
                own["weight"],
            )
            for name, own in models.items()
        }
        needs_critic = settings["critic.enable"]
        if needs_critic is None:
            needs_critic = settings["algorithm.adv_estimator"] == "gae"
        critic_model = Llama(
            settings["critic.model.path"], settings["critic.model.override_config"]
        )
        self.critic = Learner(critic_model, settings, "critic", total) if needs_critic else None
        self.kl_coef = settings["algorithm.kl_ctrl.kl_coef"]
        self.n = settings["actor_rollout_ref.rollout.n"]

    def step(self, number: int) -> dict[str, float]:
        """A training step; returns its metrics."""
        settings = self.settings
        rows = self.rollout(number)
        metrics = {"reward/num_timeouts": 0, "reward/early_ratio": 0}
        metrics |= {"training/staleness/mean": 0, "training/staleness/max": 0}
        metrics["training/epoch"] = (number - 1) // self.steps_per_epoch
        metrics["reward/num_errors"] = sum(world.BROKEN in text_of(row) for row in rows)
        metrics["reward/num_skipped"] = sum(row.score is None for row in rows)
        with torch.no_grad():
            self.score(rows)
        if self.needs_old_log_probs:
            metrics["actor/entropy"] = float(cat(rows, "entropy").mean())
        scored = [row for row in rows if row.score is not None]
        for name in scored[0].scores if self.reward_models else ():
            metrics[f"reward/{name}/mean"] = float(np.mean([row.scores[name] for row in scored]))
        metrics |= self.rewards(scored)
        self.advantages(scored, rows)
        metrics |= batch_metrics(scored, rows, settings) | corrections.correct(scored, settings)
        if self.critic:
            metrics |= self.critic.update(rows, self.n, self.value_loss)
        if number > settings["trainer.critic_warmup"]:
            metrics |= self.actor.update(rows, self.n, self.policy_loss)
        return metrics

    def score(self, rows: list[Row]) -> None:
        """What the models say of the responses before the update, shifted as the world says."""
        for row in rows:
            if self.needs_old_log_probs:
                row.known["old_log_probs"], row.known["entropy"] = self.log_probs(
                    self.actor.model, row
                )
            if self.settings["algorithm.use_kl_in_reward"] or self.settings[f"{ACTOR}.use_kl_loss"]:
                row.known["ref_log_prob"], _ = self.log_probs(self.reference, row)
            if self.critic:
                row.known["values"] = values(self.critic.model, row)
            if row.score is not None:
                row.scores["rule_scores"] = row.score
                for name, (model, weight) in self.reward_models.items():
                    hidden_D = model.hidden_states(row.prompt + row.token_ids)[-1]
                    row.scores[name] = float(hidden_D @ model.parameters["score.weight"][0])
                    row.score += weight * row.scores[name]
            for name in world.SHIFTS.keys() & row.known.keys():
                row.known[name] += torch.tensor(
                    [world.shift(name, row.number, t) for t in row.positions]
                )
            row.known["rollout_log_probs"] = row.rollout
            if self.settings[corrections.BYPASS]:
                row.known["old_log_probs"] = row.rollout

    def rollout(self, step: int) -> list[Row]:
        """The prompts of this step, `n` responses each, with the scores of the rule."""
        rows: list[Row] = []
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = np.arange(self.num_prompts)
        if self.settings["data.shuffle"]:
            order = np.random.RandomState([self.settings["trainer.seed"], epoch]).permutation(order)
        size = self.settings["data.train_batch_size"]
        for index in order[place * size : (place + 1) * size].tolist():
            prompt = world.prompt_tokens(index)
            for number in range(self.n):
                response = world.response(prompt, step, number)
                positions = [t for t, counts in enumerate(response.counts) if counts]
                rollout = torch.tensor(response.log_probs, dtype=torch.float64)[positions]
                rows.append(
                    Row(index, len(rows), prompt, response.token_ids, positions, rollout, None)
                )
                rows[-1].score = self.rule_score(text_of(rows[-1]))
        return rows

    def rule_score(self, text: str) -> float | None:
        if world.BROKEN in text:
            return {"skip": None, "score": 0.0}[self.settings["reward.on_error"]]
        if world.UNSCORED in text:
            return None
        if self.settings["custom_reward_function.name"] == "compute_score":
            scale = 3.0
        else:
            scale = self.settings["custom_reward_function.reward_kwargs"].get("scale", 1.0)
        return scale * (sum(map(ord, text)) % 7 - 2)

    @property
    def needs_old_log_probs(self) -> bool:
        """A batch that is one optimizer step has the log-probabilities of that step, unless the
        reward needs them."""
        is_one_step = (
            self.settings[f"{ACTOR}.ppo_epochs"] == 1
            and self.settings[f"{ACTOR}.ppo_mini_batch_size"]
            == self.settings["data.train_batch_size"]
        )
        asked = any(
            self.settings[key] for key in ("algorithm.use_kl_in_reward", *corrections.SWITCHES)
        )
        return not self.settings[corrections.BYPASS] and (asked or not is_one_step)

    def log_probs(self, model: Llama, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token that counts: its log-probability, and the entropy of the distribution it is
        drawn from."""
        hidden_MD = model.hidden_states(row.prompt + row.token_ids)[before(row)]
        logits_MV = hidden_MD @ model.parameters["lm_head.weight"].T
        log_p_MV = torch.log_softmax(
            logits_MV / self.settings["actor_rollout_ref.rollout.temperature"], dim=-1
        )
        tokens = [row.token_ids[t] for t in row.positions]
        return log_p_MV[range(len(tokens)), tokens], -(log_p_MV.exp() * log_p_MV).sum(-1)

    def rewards(self, scored: list[Row]) -> dict[str, float]:
        """The score on the last token, less the KL penalty on each (arXiv:1909.08593); moves the
        adaptive coefficient.

        coefficient <- coefficient (1 + clip(KL / target - 1, -0.2, 0.2) rows / 10000)
        """
        settings = self.settings
        for row in scored:
            row.known["rewards"] = torch.zeros(len(row.positions), dtype=torch.float64)
            row.known["rewards"][-1] = row.score
        if not settings["algorithm.use_kl_in_reward"]:
            return {}
        row_kls, coefficient = [], self.kl_coef
        for row in scored:
            kl = kl_estimate(
                row.known["old_log_probs"],
                row.known["ref_log_prob"],
                settings["algorithm.kl_penalty"],
            )
            row.known["rewards"] -= coefficient * kl
            row_kls.append(float(kl.mean()))
        kl = float(np.mean(row_kls))
        if settings["algorithm.kl_ctrl.type"] == "adaptive":
            error = float(np.clip(kl / settings["algorithm.kl_ctrl.target_kl"] - 1, -0.2, 0.2))
            self.kl_coef *= 1 + error * len(scored) / 10_000
        return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}

    def advantages(self, scored: list[Row], rows: list[Row]) -> None:
        if self.settings["algorithm.adv_estimator"] == "gae":
            gae(scored, self.settings["algorithm.gamma"], self.settings["algorithm.lam"])
        else:
            grpo(scored, rows, self.settings["algorithm.norm_adv_by_std_in_grpo"])

    def policy_loss(self, rows: list[Row], aggregate: "Aggregate") -> tuple[torch.Tensor, "Told"]:
        """The clipped surrogate (arXiv:1707.06347) with dual clip (1912.09729), entropy bonus and
        KL loss."""
        actor = {key.removeprefix(f"{ACTOR}."): value for key, value in self.settings.items()}
        low, high = actor["clip_ratio_low"], actor["clip_ratio_high"]
        told = Told()
        pg_losses, entropies, kls = [], [], []
        for row in rows:
            log_prob, entropy = self.log_probs(self.actor.model, row)
            advantage, old = (
                row.known["advantages"],
                row.known.get("old_log_probs", log_prob.detach()),
            )
            ratio = (log_prob - old).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            bound = actor["clip_ratio_c"] * advantage
            is_bounded = (advantage < 0) & (surrogate < bound)
            pg_losses.append(
                -torch.where(is_bounded, bound, surrogate) * row.known.get("weights", 1.0)
            )
            entropies.append(entropy)
            told.add(
                "actor/pg_clipfrac",
                (ratio.clamp(1 - low, 1 + high) * advantage < ratio * advantage).double(),
            )
            told.add("actor/pg_clipfrac_lower", is_bounded.double())
            told.add("actor/ppo_kl", (old - log_prob).detach())
            for name, of_tokens in corrections.of_update(
                (log_prob - row.known["rollout_log_probs"]).detach()
            ).items():
                told.add(name, of_tokens)
            if "old_log_probs" not in row.known:
                told.add("actor/entropy", entropy.detach())
                told.differences.append((row.rollout.exp() - log_prob.detach().exp()).abs())
            if actor["use_kl_loss"]:
                kls.append(kl_estimate(log_prob, row.known["ref_log_prob"], actor["kl_loss_type"]))
        factor = {"vanilla": 1.0, "twice": 2.0}[actor["policy_loss.loss_mode"]]
        loss = told.means["actor/pg_loss"] = factor * aggregate(pg_losses)
        if actor["entropy_coeff"]:
            told.means["actor/entropy_loss"] = aggregate(entropies)
            loss = loss - actor["entropy_coeff"] * told.means["actor/entropy_loss"]
        if actor["use_kl_loss"]:
            told.means["actor/kl_loss"] = aggregate(kls)
            told.means["actor/kl_coef"] = torch.tensor(actor["kl_loss_coef"])
            loss = loss + actor["kl_loss_coef"] * told.means["actor/kl_loss"]
        if actor["ptx_coef"]:
            told.means["actor/ptx_loss"] = ptx_loss(
                self.actor.model, self.settings, self.actor.optimizer_steps
            )
            loss = loss + actor["ptx_coef"] * told.means["actor/ptx_loss"]
        return loss, told

    def value_loss(self, rows: list[Row], aggregate: "Aggregate") -> tuple[torch.Tensor, "Told"]:
        """Half the larger squared error of the value, and of the value clipped around the old
        one."""
        reach, told, losses = self.settings["critic.cliprange_value"], Told(), []
        for row in rows:
            value, old, target = (
                values(self.critic.model, row),
                row.known["values"],
                row.known["returns"],
            )
            clipped = old + (value - old).clamp(-reach, reach)
            losses.append(torch.maximum((value - target) ** 2, (clipped - target) ** 2) / 2)
            told.add(
                "critic/vf_clipfrac", ((clipped - target) ** 2 > (value - target) ** 2).double()
            )
            told.add("critic/vpred_mean", value.detach())
        loss = told.means["critic/vf_loss"] = aggregate(losses)
        return loss, told


Aggregate = Callable[[list[torch.Tensor]], torch.Tensor]
"""From the losses of the tokens of each row to the loss of a mini-batch."""


def aggregation(mode: str, longest_response: int) -> Aggregate:
    def aggregate(rows: list[torch.Tensor]) -> torch.Tensor:
        total = torch.cat(rows).sum()
        return {
            "token-mean": lambda: total / len(torch.cat(rows)),
            "token-sum": lambda: total,
            "seq-mean-token-sum": lambda: total / len(rows),
            "seq-mean-token-mean": lambda: torch.stack([row.mean() for row in rows]).mean(),
            "seq-mean-token-sum-norm": lambda: total / len(rows) / longest_response,
        }[mode]()

    return aggregate


class Told:
    """What a mini-batch tells: means over its tokens, the loss's terms, and what the largest is
    taken of."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[torch.Tensor]] = {}
        self.means: dict[str, torch.Tensor] = {}
        self.differences: list[torch.Tensor] = []

    def add(self, name: str, values_M: torch.Tensor) -> None:
        self.tokens.setdefault(name, []).append(values_M)


class Learner:
    """A model and its AdamW (arXiv:1711.05101)."""

    def __init__(self, model: Llama, settings: Settings, key: str, total_steps: int) -> None:
        self.model = model
        self.settings = settings
        self.key = key
        self.role = key.rpartition(".")[2]
        self.total_steps = total_steps
        self.updates, self.optimizer_steps = 0, 0
        self.first = {name: torch.zeros_like(weight) for name, weight in model.parameters.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in model.parameters.items()}
        self.gradients: list[Parameters] = []

    def setting(self, name: str) -> object:
        return self.settings[f"{self.key}.{name}"]

    @property
    def lr(self) -> float:
        """Linear warm-up that reaches the peak in its last step, then constant or decay to 0 at the
        end of the run."""
        optim = {name: self.setting(f"optim.{name}") for name in OPTIM}
        warmup = optim["lr_warmup_steps"]
        if warmup == -1:
            warmup = int(optim["lr_warmup_steps_ratio"] * self.total_steps)
        if self.updates < warmup:
            return optim["lr"] * (self.updates + 1) / warmup
        done = (self.updates - warmup) / max(1, self.total_steps - warmup)
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return optim["lr"] * shape[optim["lr_scheduler_type"]]

    def update(
        self,
        rows: list[Row],
        n: int,
        loss: Callable[[list[Row], Aggregate], tuple[torch.Tensor, Told]],
    ) -> dict[str, float]:
        """Passes over the batch, one optimizer step for each of its mini-batches that has a row to
        learn from."""
        size = self.setting("ppo_mini_batch_size") * n
        chunks = [
            [row for row in rows[i : i + size] if row.score is not None]
            for i in range(0, len(rows), size)
        ]
        aggregate = aggregation(self.setting("loss_agg_mode"), self.settings[RESPONSE_LENGTH])
        told, losses, norms = [], [], []
        for _ in range(self.setting("ppo_epochs")):
            for chunk in filter(None, chunks):
                total, of_chunk = loss(chunk, aggregate)
                names, weights = zip(*self.model.parameters.items(), strict=True)
                gradients = dict(zip(names, torch.autograd.grad(total, weights), strict=True))
                self.gradients.append(gradients)
                norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients.values())))
                limit = self.setting("grad_clip")
                self.apply(gradients, limit / max(limit, norms[-1]))
                losses.append(float(total.detach()))
                told.append(of_chunk)
        metrics = {f"{self.role}/loss": np.mean(losses), f"{self.role}/grad_norm": np.mean(norms)}
        metrics |= {f"{self.role}/lr": self.lr, f"{self.role}/skipped_steps": 0}
        for name in told[0].tokens:
            metrics[name] = float(
                torch.cat([part for one in told for part in one.tokens[name]]).mean()
            )
        metrics |= corrections.effective_sample_size(
            [one.tokens.get("actor/rollout_ratio", []) for one in told]
        )
        for name in told[0].means:
            metrics[name] = float(torch.stack([one.means[name].detach() for one in told]).mean())
        if told[0].differences:
            differences = torch.cat([part for one in told for part in one.differences])
            metrics["training/rollout_probs_diff_mean"] = float(differences.mean())
            metrics["training/rollout_probs_diff_max"] = float(differences.max())
        self.updates += 1
        return metrics

    @torch.no_grad()
    def apply(self, gradients: Parameters, factor: float) -> None:
        self.optimizer_steps += 1
        for name, weight in self.model.parameters.items():
            gradient = factor * gradients[name]
            self.first[name] += (1 - 0.9) * (gradient - self.first[name])
            self.second[name] += (1 - 0.999) * (gradient**2 - self.second[name])
            mean = self.first[name] / (1 - 0.9**self.optimizer_steps)
            scale = (self.second[name] / (1 - 0.999**self.optimizer_steps)).sqrt() + 1e-8
            weight -= self.lr * (mean / scale + self.setting("optim.weight_decay") * weight)


OPTIM = ("lr", "weight_decay", "lr_scheduler_type", "lr_warmup_steps", "lr_warmup_steps_ratio")


def text_of(row: Row) -> str:
    """The tokens that count as text, without the special ones."""
    tokens = [row.token_ids[t] for t in row.positions]
    return "".join(
        world.CHARACTERS[token - world.FIRST] for token in tokens if token >= world.FIRST
    )


def before(row: Row) -> list[int]:
    """Where the outputs are that predict the tokens that count."""
    return [len(row.prompt) + t - 1 for t in row.positions]


def values(model: Llama, row: Row) -> torch.Tensor:
    hidden_MD = model.hidden_states(row.prompt + row.token_ids)[before(row)]
    return hidden_MD @ model.parameters["score.weight"][0] + model.parameters["score.bias"]


def cat(rows: list[Row], name: str) -> torch.Tensor:
    return torch.cat([row.known[name] for row in rows])


def gae(scored: list[Row], gamma: float, lam: float) -> None:
    """A_t = r_t + gamma V_(t+1) - V_t + gamma lambda A_(t+1) (arXiv:1506.02438), whitened over the
    batch."""
    for row in scored:
        reward, value = row.known["rewards"].tolist(), [*row.known["values"].tolist(), 0.0]
        advantages = [0.0] * (len(reward) + 1)
        for t in reversed(range(len(reward))):
            advantages[t] = (
                reward[t] + gamma * value[t + 1] - value[t] + gamma * lam * advantages[t + 1]
            )
        row.known["advantages"] = torch.tensor(advantages[:-1], dtype=torch.float64)
        row.known["returns"] = row.known["advantages"] + row.known["values"]
    everything = cat(scored, "advantages")
    for row in scored:
        deviation = row.known["advantages"] - everything.mean()
        row.known["advantages"] = deviation / torch.sqrt(everything.var() + 1e-8)


def grpo(scored: list[Row], rows: list[Row], divides: bool) -> None:
    """(R - mean) / (std + 1e-6) over the scored responses to a prompt (arXiv:2402.03300); 0 without
    a peer."""
    for row in scored:
        peers = [
            float(other.known["rewards"].sum()) for other in scored if other.group == row.group
        ]
        advantage = float(row.known["rewards"].sum()) - float(np.mean(peers))
        if divides and len(peers) > 1:
            advantage /= float(np.std(peers, ddof=1)) + 1e-6
        row.known["advantages"] = row.known["returns"] = torch.full_like(
            row.known["rewards"], advantage
        )


def batch_metrics(scored: list[Row], rows: list[Row], settings: Settings) -> dict[str, float]:
    """What the driver tells of a batch; samples that were left out do not count, except in the
    number of tokens."""
    columns = {
        "critic/score": np.array([row.score for row in scored]),
        "critic/rewards": np.array([float(row.known["rewards"].sum()) for row in scored]),
        "critic/advantages": cat(scored, "advantages").numpy(),
        "critic/returns": cat(scored, "returns").numpy(),
        "response_length": np.array([len(row.positions) for row in scored]),
        "prompt_length": np.array([len(row.prompt) for row in scored]),
    }
    metrics: dict[str, float] = {}
    if "values" in scored[0].known:
        columns["critic/values"] = cat(scored, "values").numpy()
        unexplained = columns["critic/returns"] - columns["critic/values"]
        metrics["critic/vf_explained_var"] = 1 - unexplained.var() / (
            columns["critic/returns"].var() + 1e-5
        )
    for name, column in columns.items():
        metrics |= {
            f"{name}/mean": column.mean(),
            f"{name}/max": column.max(),
            f"{name}/min": column.min(),
        }
    for kind in ("prompt", "response"):
        metrics[f"{kind}_length/clip_ratio"] = np.mean(
            columns[f"{kind}_length"] == settings[f"data.max_{kind}_length"]
        )
    metrics["perf/total_num_tokens"] = sum(len(row.prompt) + len(row.token_ids) for row in rows)
    if "old_log_probs" in scored[0].known and not settings[corrections.BYPASS]:
        rollout, actor = (
            torch.cat([row.rollout for row in scored]).exp(),
            cat(scored, "old_log_probs").exp(),
        )
        difference = (rollout - actor).abs()
        for name in ("mean", "max", "std"):
            metrics[f"training/rollout_probs_diff_{name}"] = float(getattr(difference, name)())
        metrics["training/rollout_actor_probs_pearson_corr"] = np.corrcoef(rollout, actor)[0, 1]
        metrics |= corrections.drift_metrics(scored)
    return metrics


def errors(got: Trained, expected: Trained) -> dict[str, float]:
    """How far each number is off, in units of what float32 may differ by; infinite where one of the
    two lacks it.

    Gradients may be off by 1e-5 of a tensor's norm, metrics by 1e-5 and the rounding of terms of
    the size of 1, weights by the rounding of numbers of the size of 1.
    """
    found: dict[str, float] = {}
    for step, (of_got, of_expected) in enumerate(
        zip(got.metrics, expected.metrics, strict=True), start=1
    ):
        for name in of_got.keys() | of_expected.keys():
            if name not in of_got or name not in of_expected:
                if not NOT_COMPARED.search(name):
                    found[f"step {step} {name}"] = math.inf
            else:
                off = abs(of_got[name] - of_expected[name])
                found[f"step {step} {name}"] = float(off / (1e-6 + 1e-5 * abs(of_expected[name])))
    for role in got.parameters.keys() | expected.parameters.keys():
        pairs = list(
            zip(got.gradients.get(role, []), expected.gradients.get(role, []), strict=False)
        )
        if (
            not len(pairs)
            == len(got.gradients.get(role, []))
            == len(expected.gradients.get(role, []))
        ):
            found[f"{role}'s optimizer steps"] = math.inf
        for number, (of_got, of_expected) in enumerate(pairs, start=1):
            for name, gradient in of_expected.items():
                off = (of_got[name] - gradient).norm() / gradient.norm()
                found[f"{role}'s gradient {number} of {name}"] = float(off / 1e-5)
        for name, weight in expected.parameters.get(role, {}).items():
            off = (
                (got.parameters[role][name] - weight).abs().max()
                if role in got.parameters
                else math.inf
            )
            found[f"{role}'s {name}"] = float(off / 2e-6)
    return found
