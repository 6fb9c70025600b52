"""The maker: it takes prompts and returns experience, which is scored responses with advantages."""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from verl_like.algorithms.advantages import estimate_advantages, get_adv_estimator_fn
from verl_like.algorithms.corrections.correction import (
    compute_rollout_correction_and_rejection_mask,
)
from verl_like.algorithms.kl import KLController, apply_kl_penalty
from verl_like.algorithms.masked import on_last_token
from verl_like.algorithms.overlong_penalty import overlong_penalty
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.algorithms.registry import read_options
from verl_like.plugins import Extensible
from verl_like.protocol import DataProto, Future, Metric, merge_metrics
from verl_like.protocol.padded import strip, view_of_samples, view_with
from verl_like.protocol.samples import SampleRows, concat_samples, count_samples, select_samples
from verl_like.single_controller.shard import ForwardedFuture
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.roles import Role
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.loop.balancing import RowWork
from verl_like.trainer.loop.experience import Experience
from verl_like.trainer.ppo import scoring
from verl_like.trainer.ppo.row_work import work_of_rows
from verl_like.trainer.ppo.scoring import PendingScores, RuleScorer
from verl_like.workers.planning.flops import ModelCost


@dataclass(frozen=True, eq=False)
class Generated:
    """Responses before any model has scored them."""

    batch: DataProto
    """(B * n,) rows of prompts with responses, the n samples of a prompt next to each other."""
    scores: PendingScores | None
    """The rules' scores, which may still be computed. None if there are no rules, or if the scores
    are columns of the batch already."""
    metrics: Mapping[str, Metric]
    """What was measured during generation."""

    def __iter__(self) -> NoReturn:
        raise ValueError(
            "what `generate` and `sample` of an ExperienceMaker return is no tuple, but a "
            "Generated: read its batch, scores and metrics"
        )


@dataclass(frozen=True, eq=False)
class Scored:
    """Responses with the columns that models and rules have computed. A phase does not change it,
    but returns another one with more columns."""

    batch: DataProto
    """What the phases read and extend: a view of `rows` with one row for each sample and padded
    columns (B, R), see `view_of_samples`."""
    rows: DataProto
    """(B * n,) rows without padding, in the form in which workers get them."""
    work: RowWork
    """How much work each row is, by which the rows are divided among ranks."""
    metrics: Mapping[str, Metric]
    """What was measured so far."""
    kept_BR: Tensor | None = None
    """The tokens of `response_mask` that the correction of rollout against trainer keeps. None if
    it rejects no tokens, or has not run yet."""

    def with_columns(
        self, columns: Mapping[str, Tensor], metrics: Mapping[str, Metric] | None = None
    ) -> "Scored":
        """Returns another Scored. Its `batch` has these columns too, in place of those that have
        the same names, and these metrics are merged into its own."""
        batch = view_with(self.batch, columns)
        merged = merge_metrics([self.metrics, metrics or {}])
        return replace(self, batch=batch, metrics=merged)


@dataclass(frozen=True)
class Weights:
    """One version of the actor's weights. Their export may still be running."""

    exported: Future[Any] | ForwardedFuture
    version: int
    send: Callable[[int], Any] | None = None
    """Called with a number of rollout processes: has the actor send them the weights while they
    load, and returns a future. It is given if the actor belongs to another driver."""
    address: tuple[str, int] | None = None
    """Where that actor waits for these processes."""


_PHASES = {
    "compute_rewards": "reward",
    "correct_rollout": "correct",
    "compute_advantages": "estimate",
    "narrow": "choose_tokens",
}
"""Methods of earlier versions, which wrote into their batch, and the phases in their place."""
_REPLACED = {
    name: f"override {phase}(scored), read scored.batch, and return scored.with_columns(...), see "
    "docs/extending.md"
    for name, phase in _PHASES.items()
}


@dataclass(kw_only=True)
class ExperienceMaker(Extensible):
    """Generates responses, scores them and estimates advantages.

    Each phase takes the value of the previous one, leaves it unchanged and returns a new one:
    `sample` returns a `Generated`, `score` a `Scored`, and `reward`, `correct`, `estimate` and
    `choose_tokens` a `Scored` with more columns; `complete` makes an `Experience` of the last. A
    subclass changes a phase by overriding its method.

    A maker shares no state with the learner. Its own state is the coefficient of `kl_controller`.
    """

    config: PPOConfig
    groups: Mapping[str, WorkerGroup]
    """The worker group of each role."""
    rule_scorer: RuleScorer | None
    """Scores responses with a reward function, or None if there are no rules."""
    reward_columns: Mapping[str, float]
    """The columns whose weighted sum is the reward, with their weights."""
    kl_controller: KLController
    """Has the coefficient of the KL penalty in the reward."""
    model_cost: ModelCost
    timer: Callable[[str], AbstractContextManager[None]]
    """Measures a phase of the driver."""
    replaced_methods: ClassVar = _REPLACED

    def make(
        self, prompts: DataProto, more_prompts: Callable[[], DataProto] | None = None
    ) -> Experience:
        """Makes experience of (B,) prompts with the present weights.

        `global_steps` in the prompts' meta_info seeds the sampling. `more_prompts` returns another
        (B,) prompts at each call; only dynamic sampling (`algorithm.filter_groups`) needs it.
        """
        generated = self.sample(prompts, more_prompts)
        return self.complete(generated)

    def begin(self, prompts: DataProto) -> Future[DataProto]:
        """Starts the generation of responses to (B,) prompts with the present weights, or of
        episodes if there are agents, and returns at once."""
        agents = self.groups.get(Role.Agent)
        if agents:
            return agents.run_episodes.remote(prompts)
        rollout = self.groups[Role.Rollout]
        return rollout.generate_sequences.remote(prompts)

    def complete(self, generated: Generated) -> Experience:
        """Makes experience of what `sample` returned."""
        scored = self.score(generated)
        with self.timer("adv"):
            rewarded = self.reward(scored)
            corrected = self.correct(rewarded)
            estimated = self.estimate(corrected)
            chosen = self.choose_tokens(estimated)
            batch = strip(chosen.batch, chosen.rows)
            return Experience(batch, chosen.work, chosen.metrics)

    def score(self, generated: Generated) -> Scored:
        """Has the models compute what rewards and advantages need, such as log-probabilities and
        values, and waits for the rules' scores.

        The calls are all submitted before the first result is awaited, so those on separate pools
        run at the same time.
        """
        config = self.config
        batch = of_present_kind(generated).batch
        frees_memory = config.actor_rollout_ref.rollout.free_cache_engine
        if frees_memory and not config.trainer.max_staleness:
            self.groups[Role.Rollout].sleep()

        work = work_of_rows(batch, self.model_cost, config)
        pending: list[Any] = []
        if config.plan.needs_old_log_probs:
            actor = self.groups[Role.Actor]
            pending.append(work.submit(actor.compute_log_prob, batch))
        if config.plan.role_of_reference:
            reference = self.groups[config.plan.role_of_reference]
            pending.append(work.submit(reference.compute_ref_log_prob, batch))
        if teacher := self.groups.get(Role.Teacher):
            pending.append(work.submit(teacher.compute_teacher_log_prob, batch))
        if critic := self.groups.get(Role.Critic):
            pending.append(work.submit(critic.compute_values, batch))
        for role in config.plan.reward_models_by_role:
            model_scores = work.submit(self.groups[role].compute_rm_score, batch)
            pending.append(scoring.ModelScores(role, model_scores))
        for role in config.plan.custom_roles:
            # This call keeps the batch's own order, so that the samples of a prompt stay together.
            pending.append(self.groups[role].annotate.remote(batch))
        if generated.scores:
            pending.append(generated.scores.complete(batch))
        rows, metrics = self.collect(batch, pending)
        merged = merge_metrics([generated.metrics, metrics])
        return Scored(view_of_samples(rows), rows, work, merged)

    def generate_and_score(
        self, prompts: DataProto, num_samples: int
    ) -> tuple[DataProto, Tensor, dict[str, Metric]]:
        """Generates and scores responses to (B,) prompts that are not trained on, as in validation.

        Only what the reward needs is computed. Returns (B * num_samples,) rows with the reward
        columns, the last one of each sample, which has its last call of the model; the reward of
        each sample, which is 0 if it could not be scored; and metrics.
        """
        plan = self.config.plan
        generated = of_present_kind(self.generate(prompts, num_samples))
        batch = generated.batch
        pending: list[Any] = []
        for role in plan.reward_models_by_role:
            model_scores = self.groups[role].compute_rm_score.remote(batch)
            pending.append(scoring.ModelScores(role, model_scores))
        for role in plan.custom_roles:
            annotate = self.groups[role].annotate
            written = set(annotate.spec.writes or ())
            if self.reward_columns.keys() & written:
                pending.append(annotate.remote(batch))
        if generated.scores:
            pending.append(generated.scores.complete(batch))
        rows, scoring_metrics = self.collect(batch, pending)
        view = view_of_samples(rows)
        scores_BR = scoring.total_scores(view, self.reward_columns)
        is_skipped_B = is_skipped(view)
        scores_B = scores_BR.sum(-1).masked_fill(is_skipped_B, 0.0)
        metrics = merge_metrics([generated.metrics, scoring_metrics])
        ends = SampleRows.of(rows).starts[1:]
        last_rows = rows.select_idxs(ends - 1)
        return last_rows, scores_B, metrics

    def load_weights(self, weights: Weights, checks_first: bool = True, drain: bool = True) -> None:
        """Has the rollout engines load weights and check them against the actor's fingerprint.

        With `checks_first` an engine checks the weights before it loads them, and keeps those it
        has if the check fails: see `RolloutEngine.load_weights`. With `drain` unfinished responses
        are completed first; without it they are continued with the new weights.
        """
        rollout = self.groups[Role.Rollout]
        sent = None
        if self.config.actor_rollout_ref.rollout.sends_directly:
            send = weights.send
            if send is None:
                actor = self.groups[Role.Actor]
                send = actor.send_weights.remote
            sent = send(rollout.world_size)
        # Only what differs from the defaults is given: a custom rollout may not know the arguments.
        options: dict[str, Any] = {}
        if not checks_first:
            options["checks_first"] = False
        if weights.address:
            options["address"] = weights.address
        if not drain:
            options["drain"] = False
        rollout.load_weights(weights.exported, version=weights.version, **options)
        if sent:
            sent.get()

    def sample(
        self,
        prompts: DataProto,
        more_prompts: Callable[[], DataProto] | None,
        generation: Future[DataProto] | None = None,
    ) -> Generated:
        """Generates the responses to train on.

        With dynamic sampling (DAPO, arXiv:2503.14476; `algorithm.filter_groups`) they are scored by
        the rules here, and a prompt counts only if its responses differ in the metric. Responses to
        further prompts from `more_prompts` are generated until as many prompts count as there are
        in `prompts`, but for at most `max_num_gen_batches` batches of prompts. If prompts are
        missing then, the first ones that did not count take their places.

        `generation` is what `begin` returned for `prompts`, if they are being generated already.
        """
        options = self.config.algorithm.filter_groups
        n = self.config.actor_rollout_ref.rollout.n
        if not options.enable:
            return self.generate_with_baselines(prompts, generation)
        assert more_prompts, "dynamic sampling replaces prompts by others"
        num_wanted = len(prompts) * n
        meta_info = prompts.meta_info
        differing = []
        equal = []
        metrics = []
        while True:
            generated = self.generate_with_baselines(prompts, generation)
            generated = self.with_scores(generated)
            batch = generated.batch
            differs_B = scoring.groups_differ(batch, options.metric)
            differing.append(batch[differs_B])
            equal.append(batch[~differs_B])
            metrics.append(generated.metrics)
            num_differing = sum(map(count_samples, differing))
            is_last_batch = len(differing) == options.max_num_gen_batches
            if num_differing >= num_wanted or is_last_batch:
                break
            prompts = more_prompts().select()
            prompts.meta_info |= meta_info  # among it the step, which seeds the sampling
            generation = None
        all_samples = concat_samples([*differing, *equal])
        batch = select_samples(all_samples, 0, num_wanted)
        num_equal = sum(map(count_samples, equal))
        num_filler = max(0, num_wanted - num_differing)
        num_surplus = max(0, num_differing - num_wanted)
        counts = {
            "rollout/num_prompt_batches": Metric.sum(len(differing)),
            "rollout/num_equal_groups": Metric.sum(num_equal // n),
            "rollout/num_filler_groups": Metric.sum(num_filler // n),
            "rollout/num_surplus_groups": Metric.sum(num_surplus // n),
        }
        merged = merge_metrics([*metrics, counts])
        return Generated(batch, None, merged)

    def with_scores(self, generated: Generated) -> Generated:
        """Waits for the rules' scores and returns the same responses with them as columns."""
        batch = of_present_kind(generated).batch
        if not generated.scores:
            return generated
        pending = generated.scores.complete(batch)
        scored, metrics = self.collect(batch, [pending])
        merged = merge_metrics([generated.metrics, metrics])
        return Generated(scored, None, merged)

    def generate_with_baselines(
        self, prompts: DataProto, generation: Future[DataProto] | None = None
    ) -> Generated:
        """Does what `generate` does, and adds the column `reward_baselines` if the estimator needs
        it.

        The baseline of a response is the reward of the greedy response to the same prompt, or NaN
        if that could not be scored.
        """
        n = self.config.actor_rollout_ref.rollout.n
        if "reward_baselines" not in self.config.plan.estimator_needs:
            return of_present_kind(self.generate(prompts, n, generation))
        greedy = prompts.select()
        greedy.meta_info = prompts.meta_info | {"greedy": True}
        answered, rewards_B, _ = self.generate_and_score(greedy, num_samples=1)
        is_skipped_B = is_skipped(answered)
        rewards_B = rewards_B.masked_fill(is_skipped_B, torch.nan)
        generated = of_present_kind(self.generate(prompts, n, generation))
        batch = generated.batch.select()
        sample_of_row = SampleRows.of(batch).sample_of_row
        prompt_of_row = sample_of_row // n
        batch.tensor_batch["reward_baselines"] = rewards_B[prompt_of_row]
        return replace(generated, batch=batch)

    def generate(
        self, prompts: DataProto, num_samples: int, generation: Future[DataProto] | None = None
    ) -> Generated:
        """Generates `num_samples` responses to each of (B,) prompts. The batch that it returns has
        B * num_samples samples, those of a prompt next to each other.

        The rules score a response as soon as it is complete, while others are still generated.
        `generation` is what `begin` returned for the prompts, if they are being generated already.
        """
        generation = generation or self.begin(prompts)
        scores = None
        if self.rule_scorer:
            scores = PendingScores(self.rule_scorer, prompts, num_samples)
            for finished in generation.stream():
                scores.add(finished)
        rows = generation.get()
        sample_of_row = SampleRows.of(rows).sample_of_row
        prompt_of_row = sample_of_row // num_samples
        without_tensors = prompts.select(batch_keys=[])
        repeated = without_tensors.select_idxs(prompt_of_row)
        batch, metrics = self.collect(repeated, [generation])
        if scores and "is_skipped" in batch.tensors():
            # What the agents left out, which the rules add to.
            batch = batch.rename("is_skipped", "is_left_out")
        return Generated(batch, scores, metrics)

    def collect(
        self, batch: DataProto, pending: Sequence[Any]
    ) -> tuple[DataProto, dict[str, Metric]]:
        """Waits for results, and returns the batch with their columns and their merged metrics."""
        metrics = []
        for future in pending:
            output = future.get()
            others = dict(output.meta_info)
            measured = others.pop("metrics", {})
            metrics.append(measured)
            columns = output.select(meta_info_keys=list(others))
            batch = batch.union(columns)
        return batch, merge_metrics(metrics)

    def reward(self, scored: Scored) -> Scored:
        """Adds the columns `token_level_scores`, the sum of all rewards, and `token_level_rewards`,
        from which the KL penalty is subtracted; both (B, R).

        r_t = score_t - beta * KL_t, with KL_t estimated from `old_log_probs` and `ref_log_prob`
        (Ziegler et al. 2019, arXiv:1909.08593). The `response_mask` of a sample that could not be
        scored becomes zero, so that it counts in no loss.
        """
        columns = scored.batch.tensor_batch
        mask_BR = columns["response_mask"]
        if "is_skipped" in columns:
            is_scored_B = ~columns["is_skipped"]
            mask_BR = mask_BR * is_scored_B.unsqueeze(-1)
        masked = view_with(scored.batch, {"response_mask": mask_BR})
        scores_BR = scoring.total_scores(masked, self.reward_columns)
        metrics = scoring.reward_means(masked, self.reward_columns)
        buffer = self.config.reward.overlong_buffer
        if buffer.enable:
            max_length = self.config.data.max_response_length
            # All drawn tokens count, in all rows of a sample, and not only scored ones.
            lengths_B = columns["response_mask"].sum(-1)
            penalty_B = overlong_penalty(lengths_B, max_length, buffer.len, buffer.penalty_factor)
            scores_BR = scores_BR + on_last_token(penalty_B, mask_BR)
            scored_B = penalty_B[mask_BR.any(-1)]  # samples that were skipped get no penalty
            mean_penalty = float(scored_B.mean())
            metrics["reward/overlong_penalty"] = Metric.mean(mean_penalty, weight=len(scored_B))
        made = {
            "response_mask": mask_BR,
            "token_level_scores": scores_BR,
            "token_level_rewards": scores_BR,
        }
        if self.config.algorithm.use_kl_in_reward:
            kl_coef = self.kl_controller.value
            rewards_BR, current_kl = apply_kl_penalty(
                scores_BR,
                columns["old_log_probs"],
                columns["ref_log_prob"],
                mask_BR,
                kl_coef=kl_coef,
                estimator=self.config.algorithm.kl_penalty,
            )
            made["token_level_rewards"] = rewards_BR
            num_scored = int(mask_BR.any(-1).sum())
            self.kl_controller.update(current_kl, n_steps=num_scored)
            metrics["actor/reward_kl_penalty"] = Metric.mean(current_kl, weight=num_scored)
            metrics["actor/reward_kl_penalty_coeff"] = Metric.mean(kl_coef, weight=num_scored)
        return scored.with_columns(made, metrics)

    def correct(self, rewarded: Scored) -> Scored:
        """Corrects for the difference between the policy of the rollout and that of the trainer, as
        `algorithm.rollout_correction` says.

        With `rollout_is` it adds the importance weights `rollout_is_weights` (B, R), and with
        `rollout_rs` it sets `kept_BR` to the tokens of `response_mask` that are not rejected. With
        `bypass_mode` it takes the rollout's log-probabilities for `old_log_probs`.
        """
        columns = rewarded.batch.tensor_batch
        config = self.config.algorithm.rollout_correction
        if config.bypass_mode:
            # The configuration refuses it together with weights or rejection.
            made = {"old_log_probs": columns["rollout_log_probs"]}
            return rewarded.with_columns(made)
        if not (config.rollout_is or config.rollout_rs):
            return rewarded
        weights_BR, kept_BR, values = compute_rollout_correction_and_rejection_mask(
            columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"], config
        )
        made = {}
        if weights_BR is not None:
            made["rollout_is_weights"] = weights_BR
        metrics = {name: Metric.mean(value) for name, value in values.items()}
        corrected = rewarded.with_columns(made, metrics)
        if config.rollout_rs:
            return replace(corrected, kept_BR=kept_BR)
        return corrected

    def estimate(self, corrected: Scored) -> Scored:
        """Adds `advantages` and `returns` (B, R) by the configured estimator."""
        batch = corrected.batch
        algorithm = self.config.algorithm
        estimator = get_adv_estimator_fn(algorithm.adv_estimator)
        inputs: dict[str, Any] = {
            "index": batch.non_tensor_batch["uid"],
            "config": algorithm,
            "options": read_options(estimator, algorithm=algorithm),
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        }
        if "scores_by_reward" in self.config.plan.estimator_needs:
            scores = scoring.scores_by_reward(batch, self.reward_columns)
            inputs["scores_by_reward"] = scores
        columns: Any = batch.batch  # a column is padded when the estimator reads it
        inputs_and_columns = ChainMap(inputs, columns)
        advantages_BR, returns_BR = estimate_advantages(estimator, inputs_and_columns)
        made = {"advantages": advantages_BR, "returns": returns_BR}
        return corrected.with_columns(made)

    def choose_tokens(self, estimated: Scored) -> Scored:
        """Chooses the tokens that the losses read, after the advantages were estimated from all
        tokens.

        If the correction rejects tokens, `response_mask` becomes `kept_BR`, and `sampled_mask` is
        the `response_mask` from before. A policy loss that selects tokens itself gets them in
        `selected_tokens`; its random numbers are seeded with the step.
        """
        columns = estimated.batch.tensor_batch
        policy = self.config.actor_rollout_ref
        made: dict[str, Tensor] = {}
        mask_BR = columns["response_mask"]
        if estimated.kept_BR is not None:
            made["sampled_mask"] = mask_BR
            made["response_mask"] = estimated.kept_BR
            mask_BR = estimated.kept_BR
        policy_loss = get_policy_loss_fn(policy.actor.policy_loss.loss_mode)
        loss_options = read_options(policy_loss, actor_rollout_ref=policy)
        select_tokens = getattr(loss_options, "select_tokens", None)
        if select_tokens:
            step = estimated.batch.meta_info["global_steps"]
            generator = torch.Generator().manual_seed(step)
            old_log_probs = columns["old_log_probs"]
            advantages = columns["advantages"]
            selected = select_tokens(old_log_probs, advantages, mask_BR, generator)
            made["selected_tokens"] = selected
        return estimated.with_columns(made)


def is_skipped(batch: DataProto) -> Tensor:
    """Returns which samples (B,) could not be scored. It is one False if all could."""
    return batch.tensor_batch.get("is_skipped", torch.tensor(False))


def of_present_kind(generated: Any) -> Generated:
    """Returns what a maker's method returned. Raises ValueError if it is not a Generated: a plugin
    for an earlier version returns a tuple."""
    if not isinstance(generated, Generated):
        raise ValueError(
            f"a maker's `generate` or `sample` returned a {type(generated).__name__}: return "
            "Generated(batch, scores, metrics) of verl_like.trainer.ppo.experience_maker"
        )
    return generated
