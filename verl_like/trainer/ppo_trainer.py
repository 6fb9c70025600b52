"""The PPO dataflow: one driver, worker groups on resource pools, and futures for what does not depend on each other."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl_like.algorithms.advantages import estimate_advantages, get_adv_estimator_fn
from verl_like.algorithms.kl import apply_kl_penalty, get_kl_controller
from verl_like.algorithms.registry import read_options
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.data.sampler import EpochSampler
from verl_like.protocol import DataProto, Future, Metric, merge_metrics, metric_values
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.ray.worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl_like.single_controller.worker_group import BoundMethod, WorkerGroup
from verl_like.trainer.balancing import RowWork
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.metrics import ValidationSample, batch_metrics, validation_metrics
from verl_like.trainer.roles import Role, process_groups
from verl_like.trainer.run_recorder import RunRecorder
from verl_like.trainer.scoring import EXTRA_PREFIX, PendingScores, RuleScorer, reward_columns, total_scores
from verl_like.workers.models.pretrained import load_hf_config
from verl_like.workers.planning.flops import ModelCost


class RayPPOTrainer:
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) of a language model, for every placement.

    `role_worker_mapping` says which worker class plays each role, `resource_pool_manager` where it runs. A role that
    PPO does not know (one of the user's own) takes part through its registered method `annotate`: it is called with
    the generated batch, next to the reference and the critic, and the columns it writes join the batch; those in its
    class's `reward_columns` are added to the reward, in validation too.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: dict[str, RayClassWithInitArgs],
        resource_pool_manager: ResourcePoolManager,
        train_dataset: PromptDataset,
        val_dataset: PromptDataset,
        rule_scorer: RuleScorer | None,
        recorder: RunRecorder,
        ray_worker_group_cls: Callable[..., RayWorkerGroup] = RayWorkerGroup,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.rule_scorer = rule_scorer
        self.recorder = recorder
        if rule_scorer:
            rule_scorer.on_call = recorder.timeline.record
        worker_classes = {role: built.cls for role, built in role_worker_mapping.items()}
        self.reward_columns = reward_columns(worker_classes, with_rules=rule_scorer is not None)
        self.ray_worker_group_cls = ray_worker_group_cls
        self.sampler = EpochSampler(
            len(train_dataset), config.data.train_batch_size, seed=config.trainer.seed, shuffle=config.data.shuffle
        )
        self.estimator = get_adv_estimator_fn(config.algorithm.adv_estimator)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.model_cost = ModelCost.of(load_hf_config(config.actor_rollout_ref.model, key="actor_rollout_ref.model"))
        self.global_step = 0
        self.groups: dict[str, WorkerGroup] = {}
        self.metrics: list[dict[str, Metric]] = []  # of the present step or validation

    def init_workers(self) -> None:
        """Starts the processes of every pool and loads the models; groups load at the same time."""
        self.groups = self.start_groups()
        self.actor, self.rollout = self.groups[Role.Actor], self.groups[Role.Rollout]
        self.reference, self.critic = self.groups.get(Role.RefPolicy), self.groups.get(Role.Critic)
        self.reward_model = self.groups.get(Role.RewardModel)
        self.annotators = {role: group for role, group in self.groups.items() if role not in list(Role)}
        others = [group for group in self.groups.values() if group is not self.rollout]
        if self.config.trainer.device == "cuda":
            # An engine takes its share of what is free on its device, so what else lives there loads first.
            order = [others, [self.rollout]]
        else:
            order = [[self.rollout, *others]]
        for groups in order:
            for future in [group.init_model.remote() for group in groups]:
                future.get()
        self.load_weights(self.actor.export_weights.remote(version=self.global_step))

    def start_groups(self) -> dict[str, WorkerGroup]:
        """A worker group for each role; training roles of one pool share their processes."""
        groups, placement = {}, []
        roles_of_pools = process_groups({role: self.config.role_mapping[role] for role in self.role_worker_mapping})
        for pool, roles in roles_of_pools:
            processes = self.ray_worker_group_cls(
                self.resource_pool_manager.get_resource_pool(roles[0]),
                create_colocated_worker_cls({role: self.role_worker_mapping[role] for role in roles}),
                deadline_s=self.config.trainer.call_timeout_s,
                on_call=self.recorder.timeline.record,
            )
            groups |= processes.spawn(roles)
            placement.append((pool, roles, processes))
        self.recorder.show_placement(placement)
        return groups

    def fit(self) -> None:
        """Trains for the configured number of steps, validating before and every `test_freq`, and saves the end."""
        trainer = self.config.trainer
        total_steps = trainer.total_training_steps
        assert total_steps is not None  # filled in when the inputs were checked
        if trainer.val_before_train:
            with self.recorder.validation():
                metrics = self.validate()
            self.recorder.log_validation(metrics)
        while self.global_step < total_steps:
            epoch, rows = self.sampler.batch(self.global_step)
            self.global_step += 1
            with self.recorder.step(self.global_step, epoch, total_steps) as log:
                log(self.step(self.train_dataset.collate([self.train_dataset[i] for i in rows], epoch)))
                is_last = self.global_step == total_steps
                if trainer.test_freq > 0 and (is_last or self.global_step % trainer.test_freq == 0):
                    with self.recorder.validation():
                        log(self.validate())
                if is_last or (trainer.save_freq > 0 and self.global_step % trainer.save_freq == 0):
                    with self.recorder.timer("save_checkpoint"):
                        self.save()

    def step(self, prompts: DataProto) -> dict[str, float]:
        """One PPO iteration over (B,) prompts; returns the step's metrics.

        Calls that do not need each other's results are submitted together and collected afterwards: on pools of
        their own they overlap, on a shared pool they queue, and the numbers are the same.
        """
        self.metrics = []
        prompts.meta_info["global_steps"] = self.global_step
        batch, scores = self.generate(prompts, num_samples=self.config.actor_rollout_ref.rollout.n)
        self.rollout.sleep()

        work = RowWork.of(batch, self.model_cost, balance=self.config.trainer.balance_batch)
        pending: list[Any] = []
        if self.config.needs_old_log_probs:
            pending.append(self.submit(self.actor.compute_log_prob, batch, work))
        if self.reference:
            pending.append(self.submit(self.reference.compute_ref_log_prob, batch, work))
        if self.critic:
            pending.append(self.submit(self.critic.compute_values, batch, work))
        if self.reward_model:
            pending.append(self.submit(self.reward_model.compute_rm_score, batch, work))
        # Not in balanced order, so that the samples of a prompt stay together.
        pending += [group.annotate.remote(batch) for group in self.annotators.values()]
        pending += [scores.complete(batch)] if scores else []
        for future in pending:
            batch = batch.union(self.collect(future))

        with self.recorder.timer("adv"):
            self.compute_rewards(batch)
            self.compute_advantages(batch)

        updates, n = [], self.config.actor_rollout_ref.rollout.n
        if self.critic:
            rows = self.config.critic.ppo_mini_batch_size * n
            updates.append(self.submit(self.critic.update_critic, batch, work, mini_batch_rows=rows))
        rows = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * n
        if self.global_step > self.config.trainer.critic_warmup:
            updates.append(self.submit(self.actor.update_actor, batch, work, mini_batch_rows=rows))
        exported = self.actor.export_weights.remote(version=self.global_step)
        # The driver's own work that nothing waits for is done while the updates run.
        data = self.config.data
        self.metrics.append(batch_metrics(batch, data.max_prompt_length, data.max_response_length))
        self.metrics.append(work.metrics(self.actor.update_actor, rows))
        for future in updates:
            self.collect(future)
        with self.recorder.timer("update_weights"):
            self.load_weights(exported)
        return metric_values(merge_metrics(self.metrics))

    def submit(
        self, method: BoundMethod, batch: DataProto, work: RowWork, mini_batch_rows: int | None = None
    ) -> Future[Any]:
        """Starts a method on the batch, its rows shared out evenly; results are in the batch's own order."""
        return method.remote(work.ordered(batch, method, mini_batch_rows))

    def generate(self, prompts: DataProto, num_samples: int) -> tuple[DataProto, PendingScores | None]:
        """(B,) prompts -> (B * num_samples,) prompts with responses, the samples of a prompt next to each other.

        The rule rewards of responses that are complete while others are still generated are on their way then.
        """
        generation = self.rollout.generate_sequences.remote(prompts)
        scores = self.rule_scorer.expect(prompts, num_samples) if self.rule_scorer else None
        for finished in generation.stream():
            if scores:
                scores.add(finished)
        generated = self.collect(generation)
        return prompts.select(batch_keys=[]).repeat(num_samples, interleave=True).union(generated), scores

    def collect(self, future: Any) -> DataProto:
        """Waits for a result and files its metrics."""
        output = future.get()
        self.metrics.append(output.meta_info.pop("metrics", {}))
        return output

    def compute_rewards(self, batch: DataProto) -> None:
        """Adds up the scores and subtracts the KL penalty: `token_level_scores`, `token_level_rewards` (B R).

        r_t = score_t - beta * KL_t, with KL_t estimated from `old_log_probs` and `ref_log_prob` (Ziegler et al. 2019,
        arXiv:1909.08593). Samples that could not be scored leave every loss: their `response_mask` becomes zero.
        """
        columns = batch.batch
        mask_BR = columns["response_mask"]
        if "is_skipped" in columns:
            mask_BR = mask_BR * ~columns["is_skipped"].unsqueeze(-1)
        columns["response_mask"] = mask_BR
        columns["token_level_scores"] = total_scores(batch, self.reward_columns)
        columns["token_level_rewards"] = columns["token_level_scores"]
        if self.config.algorithm.use_kl_in_reward:
            kl_coef = self.kl_controller.value
            columns["token_level_rewards"], current_kl = apply_kl_penalty(
                columns["token_level_scores"],
                columns["old_log_probs"],
                columns["ref_log_prob"],
                mask_BR,
                kl_coef=kl_coef,
                estimator=self.config.algorithm.kl_penalty,
            )
            num_scored = int(mask_BR.any(-1).sum())
            if num_scored:
                self.kl_controller.update(current_kl, n_steps=num_scored)
            self.metrics.append({"actor/reward_kl_penalty": Metric.mean(current_kl)})
            self.metrics.append({"actor/reward_kl_penalty_coeff": Metric.mean(kl_coef)})

    def compute_advantages(self, batch: DataProto) -> None:
        """Adds `advantages` and `returns` (B R) by the configured estimator."""
        columns, algorithm = batch.batch, self.config.algorithm
        inputs = {**columns, "index": batch.non_tensor_batch["uid"], "config": algorithm}
        inputs["options"] = read_options(self.estimator, algorithm=algorithm)
        inputs |= {"gamma": algorithm.gamma, "lam": algorithm.lam}
        inputs["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std_in_grpo
        columns["advantages"], columns["returns"] = estimate_advantages(self.estimator, inputs)

    def load_weights(self, exported: Future[Any]) -> None:
        """Takes the actor's weights to the rollout engines, which check them against the actor's fingerprint.

        Also during the critic's warm-up: an engine that slept has no weights.
        """
        self.rollout.load_weights(exported, version=self.global_step)
        self.actor.report_finished_calls()  # nobody waits for the export itself

    def validate(self) -> dict[str, float]:
        """Scores the validation set with `rollout.val_kwargs` and shows a few generations; `val-core/...` metrics."""
        self.metrics = []
        rows = [self.val_dataset[i] for i in range(len(self.val_dataset))]
        prompts = self.val_dataset.collate(rows, epoch=0)
        prompts.meta_info |= {"validate": True, "global_steps": self.global_step}
        batch, scores = self.generate(prompts, num_samples=self.config.actor_rollout_ref.rollout.val_kwargs.n)
        pending: list[Any] = [self.reward_model.compute_rm_score.remote(batch)] if self.reward_model else []
        for role, group in self.annotators.items():
            pending += [group.annotate.remote(batch)] if self.role_worker_mapping[role].cls.reward_columns else []
        pending += [scores.complete(batch)] if scores else []
        for future in pending:
            batch = batch.union(self.collect(future))
        scores_B = total_scores(batch, self.reward_columns).sum(-1)
        scores_B = scores_B.masked_fill(batch.batch.get("is_skipped", torch.tensor(False)), 0.0)
        self.recorder.show_generations(self.global_step, self.tokenizer, batch, scores_B)
        called = metric_values(merge_metrics(self.metrics))
        counts = {
            name.replace("reward/", "val-aux/"): n for name, n in called.items() if name.startswith("reward/num_")
        }
        return validation_metrics(validation_samples(batch, scores_B)) | counts

    def save(self) -> None:
        """Writes the models in Hugging Face format, and with `save_freq` also what training needs to go on."""
        folder = self.recorder.run_dir / f"global_step_{self.global_step}"
        trained = {Role.Actor: self.actor} | ({Role.Critic: self.critic} if self.critic else {})
        for role, group in trained.items():
            group.save_hf(str(folder / role / "huggingface"))
            if self.config.trainer.save_freq > 0:
                group.save_checkpoint(str(folder / role / "checkpoint"))


def validation_samples(batch: DataProto, scores_B: torch.Tensor) -> list[ValidationSample]:
    """The reward of each response (0 where it was skipped) and the numbers that the reward function added to it."""
    columns = batch.non_tensor_batch
    added = {
        name: values for name, values in columns.items() if name.startswith(EXTRA_PREFIX) and values.dtype != object
    }
    return [
        ValidationSample(
            data_source=columns["data_source"][i],
            prompt_id=columns["uid"][i],
            values={"reward": score}
            | {name.removeprefix(EXTRA_PREFIX): float(v[i]) for name, v in added.items() if not np.isnan(v[i])},
        )
        for i, score in enumerate(scores_B.tolist())
    ]
