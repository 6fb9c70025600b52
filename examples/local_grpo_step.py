"""One GRPO step of a tiny model in this process, without Ray, for the debugger.

    python -m examples.local_grpo_step

The workers are objects of this process, so a breakpoint works anywhere, also in verl_like/workers.
Only the reward function runs in a process of its own, as always.
"""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.split_placement.make_toy_world import Settings, make_model, make_row, make_tokenizer
from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.inputs import load_dataset, start_reward_manager
from verl_like.trainer.ppo.local_trainer import LocalTrainer
from verl_like.trainer.ppo.scoring import RuleScorer
from verl_like.trainer.ppo.workers import build_role_worker_mapping
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.workers.models.pretrained import load_tokenizer

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the response, which even a random model can raise."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
'''


def write_inputs(folder: Path) -> PPOConfig:
    """Writes a random model, two prompts and the reward function; returns a configuration of GRPO
    on them."""
    tokenizer = make_tokenizer()
    make_model(Settings(hidden_size=32), tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [make_row(problem, "train", index) for index, problem in enumerate([(12, 34), (56, 78)])]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    return load_ppo_config(
        [
            "device=cpu",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={folder}/run",
            "trainer.total_training_steps=1",
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/train.parquet",
            "data.train_batch_size=2",
            "data.max_prompt_length=12",
            "data.max_response_length=6",
            f"actor_rollout_ref.model.path={folder}/model",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.n=4",
            "algorithm.adv_estimator=grpo",
            f"custom_reward_function.path={folder}/reward.py",
            "reward.num_workers=1",
        ]
    )


def main() -> dict[str, float]:
    """Runs the step and prints what it made; returns the metrics of the update."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_inputs(Path(folder))
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        dataset = load_dataset(config, tokenizer, "train")
        rewards = start_reward_manager(config)
        trainer = LocalTrainer(
            config,
            tokenizer,
            build_role_worker_mapping(config, {}),
            resource_pool_manager=None,
            train_dataset=dataset,
            val_dataset=dataset,
            rule_scorer=RuleScorer(rewards, tokenizer, scores_every_row=True),
            recorder=RunRecorder(config, PPO_DISPLAY),
        )
        trainer.init_workers()

        prompts = dataset.collate([dataset[0], dataset[1]], epoch=0)
        prompts.meta_info["global_steps"] = 1
        experience = trainer.maker.make(prompts)
        update = trainer.learner.learn(experience)
        trainer.load_weights(trainer.learner.export_weights())
        metrics = {name: metric.value for name, metric in update.get().items()}

        rewards.close()
    batch = experience.batch
    for i, uid in enumerate(batch.non_tensor_batch["uid"]):
        response = tokenizer.decode(batch.batch["responses"][i])
        score = batch.batch["token_level_scores"][i].sum()
        advantage = batch.batch["advantages"][i][0]
        print(f"group {uid}  score {score:.2f}  advantage {advantage:+.2f}  {response!r}")
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
        print(f"{name} {metrics[name]:.4f}")
    return metrics


if __name__ == "__main__":
    main()
