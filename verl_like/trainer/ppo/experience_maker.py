"""The maker: prompts in, experience out."""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from verl_like.algorithms.advantages import estimate_advantages, get_adv_estimator_fn
from verl_like.algorithms.corrections.correction import (
    compute_rollout_correction_and_rejection_mask,
)
from verl_like.algorithms.kl import KLController, apply_kl_penalty
from verl_like.algorithms.masked import on_last_token
from verl_like.algorithms.overlong_penalty import overlong_penalty
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.algorithms.registry import read_options
from verl_like.plugins import refuse_replaced
from verl_like.protocol import DataProto, Future, Metric, merge_metrics
from verl_like.protocol.padded import padded, strip, view_of_samples, view_with
from verl_like.protocol.samples import concat_samples, count_samples, select_samples
from verl_like.single_controller.shard import ForwardedFuture
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.roles import Role
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.loop.balancing import RowWork
from verl_like.trainer.loop.experience import Experience
from verl_like.trainer.ppo import scoring
from verl_like.trainer.ppo.scoring import PendingScores, RuleScorer
from verl_like.workers.planning.flops import ModelCost


@dataclass(frozen=True, eq=False)
class Generated:
    """Responses, which models have not scored yet."""

    batch: DataProto
    """(B * n,) rows of prompts with responses, the samples of a prompt next to each other."""
    scores: PendingScores | None
    """Of the rules, which may still be computed; None where none are pending."""
    metrics: Mapping[str, Metric]
    """What was measured while they were generated."""

    def __iter__(self) -> NoReturn:
        raise ValueError(
            "what `generate` and `sample` of an ExperienceMaker return is no tuple, but a "
            "Generated: read its batch, scores and metrics"
        )


@dataclass(frozen=True, eq=False)
class Scored:
    """Responses with what models and rules say of them. Each phase makes another one, with what it
    adds."""

    batch: DataProto
    """A view of `rows`, with a row for each sample and padded columns (B, R): see
    `view_of_samples`."""
    rows: DataProto
    """(B * n,) rows with the columns that models and rules have computed."""
    work: RowWork
    """By which the rows are divided among ranks."""
    metrics: Mapping[str, Metric]
    """What was measured so far."""
    kept_BR: torch.Tensor | None = None
    """The tokens that a correction leaves of `response_mask`; None before, and where it takes none
    away."""

    def with_columns(
        self, columns: Mapping[str, torch.Tensor], metrics: Mapping[str, Metric] | None = None
    ) -> "Scored":
        """The same with columns of the view, in place of those of their names or beside them, and
        with metrics."""
        merged = merge_metrics([self.metrics, metrics or {}])
        return replace(self, batch=view_with(self.batch, columns), metrics=merged)


@dataclass(frozen=True)
class Weights:
    """The actor's weights as one version; the export may still be running."""

    exported: Future[Any] | ForwardedFuture
    version: int
    send: Callable[[int], Any] | None = None
    """Has another driver's actor send them to so many processes, which load them meanwhile; returns
    a future."""
    address: tuple[str, int] | None = None
    """Where that actor waits for these processes."""


_REPLACED = {
    name: f"override {phase}(scored), read scored.batch, and return scored.with_columns(...), see "
    "docs/extending.md"
    for name, phase in {
        "compute_rewards": "reward",
        "correct_rollout": "correct",
        "compute_advantages": "estimate",
        "narrow": "choose_tokens",
    }.items()
}
"""Methods that wrote into their batch, and what takes their place."""


@dataclass(kw_only=True)
class ExperienceMaker:
    """Generates responses, scores them and estimates advantages. A subclass changes a phase by
    overriding its method.

    Each phase makes a value of the one before, and leaves that as it is: `sample` a `Generated`,
    `score` a `Scored`, `reward`, `correct` and `estimate` a `Scored` with more columns, `complete`
    the `Experience`.

    A maker shares no state with the learner. Its own state is the coefficient of `kl_controller`.
    """

    config: PPOConfig
    groups: Mapping[str, WorkerGroup]
    """The group of each role."""
    rule_scorer: RuleScorer | None
    reward_columns: Mapping[str, float]
    """The columns whose weighted sum is the reward."""
    kl_controller: KLController
    model_cost: ModelCost
    timer: Callable[[str], AbstractContextManager[None]]
    """Measures a phase of the driver."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises ValueError for a subclass with a phase of earlier versions, which nothing would
        call."""
        super().__init_subclass__(**arguments)
        refuse_replaced(cls, _REPLACED)

    def make(
        self, prompts: DataProto, more_prompts: Callable[[], DataProto] | None = None
    ) -> Experience:
        """Makes experience of (B,) prompts with the present weights; meta `global_steps` seeds the
        sampling.

        `more_prompts` returns further (B,) prompts, which dynamic sampling
        (`algorithm.filter_groups`) needs.
        """
        return self.complete(self.sample(prompts, more_prompts))

    def begin(self, prompts: DataProto) -> Future[DataProto]:
        """Has the responses to (B,) prompts generated with the present weights; returns at once."""
        return self.groups[Role.Rollout].generate_sequences.remote(prompts)

    def complete(self, generated: Generated) -> Experience:
        """Makes experience of what `sample` returned."""
        scored = self.score(generated)
        with self.timer("adv"):
            rewarded = self.reward(scored)
            corrected = self.correct(rewarded)
            estimated = self.estimate(corrected)
            chosen = self.choose_tokens(estimated)
            return Experience(strip(chosen.batch, chosen.rows), chosen.work, chosen.metrics)

    def score(self, generated: Generated) -> Scored:
        """Has models compute what rewards and advantages need of the responses, and waits for the
        rules."""
        batch = of_present_kind(generated).batch
        if (
            self.config.actor_rollout_ref.rollout.free_cache_engine
            and not self.config.trainer.max_staleness
        ):
            self.groups[Role.Rollout].sleep()

        work = RowWork.of(batch, self.model_cost, balance=self.config.trainer.balance_batch)
        plan = self.config.plan
        pending: list[Any] = []
        if plan.needs_old_log_probs:
            pending.append(work.submit(self.groups[Role.Actor].compute_log_prob, batch))
        if role := plan.role_of_reference:
            pending.append(work.submit(self.groups[role].compute_ref_log_prob, batch))
        if teacher := self.groups.get(Role.Teacher):
            pending.append(work.submit(teacher.compute_teacher_log_prob, batch))
        if critic := self.groups.get(Role.Critic):
            pending.append(work.submit(critic.compute_values, batch))
        for role in plan.reward_models_by_role:
            scores = work.submit(self.groups[role].compute_rm_score, batch)
            pending.append(scoring.ModelScores(role, scores))
        # Not in balanced order, so that the samples of a prompt stay together.
        pending += [self.groups[role].annotate.remote(batch) for role in plan.custom_roles]
        pending += [generated.scores.complete(batch)] if generated.scores else []
        batch, metrics = self.collect(batch, pending)
        merged = merge_metrics([generated.metrics, metrics])
        return Scored(view_of_samples(batch), batch, work, merged)

    def generate_and_score(
        self, prompts: DataProto, num_samples: int
    ) -> tuple[DataProto, torch.Tensor, dict[str, Metric]]:
        """Responses to (B,) prompts that are not trained on, as in validation (meta `validate`).

        Returns (B * num_samples,) rows with their reward columns; the reward of each, 0 where it
        was skipped; metrics.
        """
        generated = of_present_kind(self.generate(prompts, num_samples))
        batch = generated.batch
        scores = generated.scores
        pending: list[Any] = []
        for role in self.config.plan.reward_models_by_role:
            pending.append(
                scoring.ModelScores(role, self.groups[role].compute_rm_score.remote(batch))
            )
        for role in self.config.plan.custom_roles:
            annotate = self.groups[role].annotate
            if self.reward_columns.keys() & set(annotate.spec.writes or ()):
                pending.append(annotate.remote(batch))
        pending += [scores.complete(batch)] if scores else []
        batch, scoring_metrics = self.collect(batch, pending)
        rewards = padded(batch, [*self.reward_columns, "is_skipped"])
        scores_B = scoring.total_scores(rewards, self.reward_columns).sum(-1)
        scores_B = scores_B.masked_fill(
            batch.tensor_batch.get("is_skipped", torch.tensor(False)), 0.0
        )
        return batch, scores_B, merge_metrics([generated.metrics, scoring_metrics])

    def load_weights(self, weights: Weights, checks_first: bool = True, drain: bool = True) -> None:
        """Takes weights to the rollout engines, which check them against the actor's fingerprint.

        With `checks_first` they keep what they have where something else came: see
        `RolloutEngine.load_weights`. With `drain` responses that are unfinished end before, and
        without it they go on with the new weights.
        """
        rollout = self.groups[Role.Rollout]
        sent = None
        if self.config.actor_rollout_ref.rollout.sends_directly:
            send = weights.send or self.groups[Role.Actor].send_weights.remote
            sent = send(rollout.world_size)
        options: dict[str, Any] = {} if checks_first else {"checks_first": False}
        options |= {"address": weights.address} if weights.address else {}
        options |= {} if drain else {"drain": False}
        rollout.load_weights(weights.exported, version=weights.version, **options)
        if sent:
            sent.get()

    def sample(
        self,
        prompts: DataProto,
        more_prompts: Callable[[], DataProto] | None,
        generation: Future[DataProto] | None = None,
    ) -> Generated:
        """The responses to train on, with `algorithm.filter_groups` those of dynamic sampling,
        scored by the rules.

        Dynamic sampling (DAPO, arXiv:2503.14476) keeps only prompts whose responses differ in the
        metric. It generates for further prompts until there are as many of these as `prompts`, at
        most `max_num_gen_batches` times; what is missing then is filled with the first prompts that
        were dropped.
        """
        options = self.config.algorithm.filter_groups
        n = self.config.actor_rollout_ref.rollout.n
        if not options.enable:
            return self.generate_with_baselines(prompts, generation)
        assert more_prompts, "dynamic sampling replaces prompts by others"
        num_wanted = len(prompts) * n
        meta_info = prompts.meta_info
        differing: list[DataProto] = []
        equal: list[DataProto] = []
        metrics: list[Mapping[str, Metric]] = []
        while True:
            generated = self.generate_with_baselines(prompts, generation)
            assert generated.scores, "only rules score before the whole batch is there"
            generated = self.with_scores(generated)
            differs_B = scoring.groups_differ(generated.batch, options.metric)
            differing.append(generated.batch[differs_B])
            equal.append(generated.batch[~differs_B])
            metrics.append(generated.metrics)
            num_differing = sum(map(count_samples, differing))
            if num_differing >= num_wanted or len(differing) == options.max_num_gen_batches:
                break
            prompts = more_prompts().select()
            generation = None
            prompts.meta_info |= meta_info
        batch = select_samples(concat_samples([*differing, *equal]), 0, num_wanted)
        counts = {
            "rollout/num_prompt_batches": len(differing),
            "rollout/num_equal_groups": sum(map(count_samples, equal)) // n,
            "rollout/num_filler_groups": max(0, num_wanted - num_differing) // n,
            "rollout/num_surplus_groups": max(0, num_differing - num_wanted) // n,
        }
        merged = merge_metrics(
            [*metrics, {name: Metric.sum(count) for name, count in counts.items()}]
        )
        return Generated(batch, None, merged)

    def with_scores(self, generated: Generated) -> Generated:
        """The same responses with the scores of the rules, for which it waits."""
        scores = of_present_kind(generated).scores
        if not scores:
            return generated
        batch, metrics = self.collect(generated.batch, [scores.complete(generated.batch)])
        return Generated(batch, None, merge_metrics([generated.metrics, metrics]))

    def generate_with_baselines(
        self, prompts: DataProto, generation: Future[DataProto] | None = None
    ) -> Generated:
        """What `generate` returns, with the column `reward_baselines` where the estimator needs
        it."""
        n = self.config.actor_rollout_ref.rollout.n
        if "reward_baselines" not in self.config.plan.estimator_needs:
            return of_present_kind(self.generate(prompts, n, generation))
        greedy = prompts.select()
        greedy.meta_info = prompts.meta_info | {"greedy": True}
        answered, rewards_B, _ = self.generate_and_score(greedy, num_samples=1)
        # NaN: without a greedy reward there is no baseline.
        is_skipped_B = answered.tensor_batch.get("is_skipped", torch.tensor(False))
        rewards_B = rewards_B.masked_fill(is_skipped_B, torch.nan)
        generated = of_present_kind(self.generate(prompts, n, generation))
        batch = generated.batch.select()
        batch.tensor_batch["reward_baselines"] = rewards_B.repeat_interleave(n)
        return replace(generated, batch=batch)

    def generate(
        self, prompts: DataProto, num_samples: int, generation: Future[DataProto] | None = None
    ) -> Generated:
        """(B,) prompts -> (B * num_samples,) prompts with responses, the samples of a prompt next
        to each other.

        Rules already score responses that are complete while others are still generated.
        `generation` is what `begin` returned for the prompts.
        """
        generation = generation or self.begin(prompts)
        scores = PendingScores(self.rule_scorer, prompts, num_samples) if self.rule_scorer else None
        for finished in generation.stream():
            if scores:
                scores.add(finished)
        repeated = prompts.select(batch_keys=[]).repeat(num_samples, interleave=True)
        batch, metrics = self.collect(repeated, [generation])
        return Generated(batch, scores, metrics)

    def collect(
        self, batch: DataProto, pending: Sequence[Any]
    ) -> tuple[DataProto, dict[str, Metric]]:
        """Waits for results, adds their columns to the batch and merges their metrics."""
        metrics = []
        for future in pending:
            output = future.get()
            metrics.append(output.meta_info.get("metrics", {}))
            batch = batch.union(
                output.select(
                    meta_info_keys=[name for name in output.meta_info if name != "metrics"]
                )
            )
        return batch, merge_metrics(metrics)

    def reward(self, scored: Scored) -> Scored:
        """Adds up the scores and subtracts the KL penalty: `token_level_scores`,
        `token_level_rewards` (B R).

        r_t = score_t - beta * KL_t, with KL_t estimated from `old_log_probs` and `ref_log_prob`
        (Ziegler et al. 2019, arXiv:1909.08593). Samples that could not be scored leave every loss:
        their `response_mask` becomes zero.
        """
        columns = scored.batch.tensor_batch
        mask_BR = columns["response_mask"]
        if "is_skipped" in columns:
            mask_BR = mask_BR * ~columns["is_skipped"].unsqueeze(-1)
        masked = view_with(scored.batch, {"response_mask": mask_BR})
        scores_BR = scoring.total_scores(masked, self.reward_columns)
        metrics = scoring.reward_means(masked, self.reward_columns)
        if (buffer := self.config.reward.overlong_buffer).enable:
            max_length = self.config.data.max_response_length
            # Of all rows of a sample
            lengths_B = columns["attention_mask"][:, -mask_BR.size(1) :].sum(-1)
            penalty_B = overlong_penalty(lengths_B, max_length, buffer.len, buffer.penalty_factor)
            scores_BR = scores_BR + on_last_token(penalty_B, mask_BR)
            scored_B = penalty_B[mask_BR.any(-1)]  # those that were skipped get none
            metrics["reward/overlong_penalty"] = Metric.mean(
                float(scored_B.mean()), weight=len(scored_B)
            )
        made = {
            "response_mask": mask_BR,
            "token_level_scores": scores_BR,
            "token_level_rewards": scores_BR,
        }
        if not self.config.algorithm.use_kl_in_reward:
            return scored.with_columns(made, metrics)
        kl_coef = self.kl_controller.value
        made["token_level_rewards"], current_kl = apply_kl_penalty(
            scores_BR,
            columns["old_log_probs"],
            columns["ref_log_prob"],
            mask_BR,
            kl_coef=kl_coef,
            estimator=self.config.algorithm.kl_penalty,
        )
        num_scored = int(mask_BR.any(-1).sum())
        self.kl_controller.update(current_kl, n_steps=num_scored)
        metrics["actor/reward_kl_penalty"] = Metric.mean(current_kl, weight=num_scored)
        metrics["actor/reward_kl_penalty_coeff"] = Metric.mean(kl_coef, weight=num_scored)
        return scored.with_columns(made, metrics)

    def correct(self, rewarded: Scored) -> Scored:
        """Compares rollout and trainer as `algorithm.rollout_correction` says: adds
        `rollout_is_weights` (B R), and as `kept_BR` the tokens that remain of `response_mask`."""
        columns = rewarded.batch.tensor_batch
        config = self.config.algorithm.rollout_correction
        made = {"old_log_probs": columns["rollout_log_probs"]} if config.bypass_mode else {}
        if not (config.rollout_is or config.rollout_rs):
            return rewarded.with_columns(made)
        old_log_probs = made["old_log_probs"] if config.bypass_mode else columns["old_log_probs"]
        weights_BR, kept_BR, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_probs, columns["rollout_log_probs"], columns["response_mask"], config
        )
        made |= {} if weights_BR is None else {"rollout_is_weights": weights_BR}
        corrected = rewarded.with_columns(
            made, {name: Metric.mean(value) for name, value in metrics.items()}
        )
        return replace(corrected, kept_BR=kept_BR if config.rollout_rs else None)

    def estimate(self, corrected: Scored) -> Scored:
        """Adds `advantages` and `returns` (B R) by the configured estimator."""
        batch = corrected.batch
        algorithm = self.config.algorithm
        estimator = get_adv_estimator_fn(algorithm.adv_estimator)
        inputs: dict[str, Any] = {"index": batch.non_tensor_batch["uid"], "config": algorithm}
        if "scores_by_reward" in self.config.plan.estimator_needs:
            inputs["scores_by_reward"] = scoring.scores_by_reward(batch, self.reward_columns)
        inputs["options"] = read_options(estimator, algorithm=algorithm)
        inputs |= {"gamma": algorithm.gamma, "lam": algorithm.lam}
        inputs["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std_in_grpo
        of_batch: Any = batch.batch  # which are padded when they are read
        advantages_BR, returns_BR = estimate_advantages(estimator, ChainMap(inputs, of_batch))
        return corrected.with_columns({"advantages": advantages_BR, "returns": returns_BR})

    def choose_tokens(self, estimated: Scored) -> Scored:
        """Leaves only `kept_BR` in `response_mask`, which the losses read, and picks tokens for the
        policy loss.

        It follows the advantages, for which every response counts in its group and has the reward
        on its last token. `sampled_mask` keeps what was sampled.
        """
        columns = estimated.batch.tensor_batch
        policy = self.config.actor_rollout_ref
        made = {}
        if estimated.kept_BR is not None:
            made = {"sampled_mask": columns["response_mask"], "response_mask": estimated.kept_BR}
        loss_options = read_options(
            get_policy_loss_fn(policy.actor.policy_loss.loss_mode), actor_rollout_ref=policy
        )
        if select_tokens := getattr(loss_options, "select_tokens", None):
            generator = torch.Generator().manual_seed(estimated.batch.meta_info["global_steps"])
            mask_BR = made.get("response_mask", columns["response_mask"])
            made["selected_tokens"] = select_tokens(
                columns["old_log_probs"], columns["advantages"], mask_BR, generator
            )
        return estimated.with_columns(made)


def of_present_kind(generated: Any) -> Generated:
    """What a maker's method returned, which may be a plugin's. Raises ValueError for the tuple of
    earlier versions."""
    if not isinstance(generated, Generated):
        raise ValueError(
            f"a maker's `generate` or `sample` returned a {type(generated).__name__}: return "
            "Generated(batch, scores, metrics) of verl_like.trainer.ppo.experience_maker"
        )
    return generated
