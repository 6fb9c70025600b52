"""The dataflow in one process, without Ray: the debugger's way in, and the shortest one for a reader."""

from collections.abc import Callable
from pathlib import Path

import ray
from runs import metrics_of, tiny_run_settings

from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer import run_ppo
from verl_like.trainer.config import load_config
from verl_like.trainer.ppo_trainer import RayPPOTrainer
from verl_like.trainer.run_recorder import RunRecorder
from verl_like.trainer.scoring import RuleScorer


class LocalTrainer(RayPPOTrainer):
    """The same `fit` on workers that are objects of this process."""

    def start_groups(self) -> dict[str, WorkerGroup]:
        return {
            role: LocalWorkerGroup(worker_class, role=role, on_call=self.recorder.timeline.record)
            for role, worker_class in self.role_worker_mapping.items()
        }


def test_a_whole_ppo_step_runs_in_one_process_without_ray(tmp_path: Path, tiny_llama: Callable):
    settings = tiny_run_settings(tmp_path, tiny_llama)
    config = load_config([*settings, "trainer.n_gpus_per_node=1", "algorithm.use_kl_in_reward=true"])
    config = run_ppo.with_training_steps(config, 2)
    tokenizer = run_ppo.load_tokenizer(config.actor_rollout_ref.model)
    datasets = [run_ppo.load_dataset(config, tokenizer, part) for part in ("train", "val")]
    rewards = run_ppo.start_reward_manager(config)
    recorder = RunRecorder(config)
    trainer = LocalTrainer(
        config, tokenizer, run_ppo.build_role_worker_mapping(config, {}), None, *datasets,
        RuleScorer(rewards, tokenizer, scores_every_row=True), recorder,
    )  # fmt: skip
    trainer.init_workers()
    trainer.fit()
    rewards.close()
    recorder.close("Done.")
    assert not ray.is_initialized()
    last = metrics_of(tmp_path)[-1]
    assert last["step"] == 2 and last["actor/grad_norm"] > 0 and last["critic/grad_norm"] > 0
    assert last["training/rollout_probs_diff_max"] < 1e-4
    methods = {event.method for _, _, event in recorder.timeline.events}
    assert {"generate_sequences", "compute_ref_log_prob", "update_critic", "update_actor", "load_weights"} <= methods
