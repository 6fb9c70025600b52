"""One maker and one trainer, connected by hand: who runs which models, who sends to whom, how long
each loop is.

    python -m examples.detached.by_hand [key=value ...]

`python -m verl_like.trainer.main_detached` makes the same graph from the configuration. It also
checks all input before Ray starts, starts makers that fail again, and keeps a record.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from verl_like.single_controller.ray.start import end_ray, start_ray
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.detached_trainer import DetachedPPOTrainer
from verl_like.trainer.detached.ledger import PromptLedger
from verl_like.trainer.detached.maker_holder import ExperienceMakerHolder, PromptLoader
from verl_like.trainer.ppo.inputs import load_dataset
from verl_like.workers.actor import ActorWorker
from verl_like.workers.copies import ActorCopyWorker, CriticCopyWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.models.pretrained import load_tokenizer
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker
from verl_like.workers.rollout_worker import RolloutWorker

FOLDER = Path(__file__).parent / "config"
MINUTES = 60.0


def maker_models(config: DetachedConfig) -> Mapping[str, RayClassWithInitArgs]:
    """What a maker runs of these, as the configuration says: GRPO with rules the engine and the
    initial policy."""
    policy = config.actor_rollout_ref
    critic = config.critic
    seed = config.trainer.seed
    transport = policy.rollout.weight_transport
    models = {
        "rollout": RayClassWithInitArgs(RolloutWorker, config=policy, seed=seed),
        "actor": RayClassWithInitArgs(ActorCopyWorker, config=policy),
        "critic": RayClassWithInitArgs(
            CriticCopyWorker, config=critic, seed=seed, weight_transport=transport
        ),
        "ref": RayClassWithInitArgs(ReferenceWorker, config=policy),
        "reward_model": RayClassWithInitArgs(RewardModelWorker, config=config.reward_model),
    }
    return {role: models[role] for role in config.plan.maker_roles}


def trainer_models(config: DetachedConfig) -> Mapping[str, RayClassWithInitArgs]:
    """What a trainer runs of these: GRPO the policy alone."""
    policy = config.actor_rollout_ref
    critic = config.critic
    steps = config.trainer.total_training_steps
    arguments: dict[str, Any] = {"seed": config.trainer.seed, "rollout_n": policy.rollout.n}
    arguments |= {
        "total_training_steps": steps,
        "weight_transport": policy.rollout.weight_transport,
    }
    models = {
        "actor": RayClassWithInitArgs(ActorWorker, config=policy, total_training_steps=steps),
        "critic": RayClassWithInitArgs(CriticWorker, config=critic, **arguments),
    }
    return {role: models[role] for role in config.plan.trainer_roles}


def main(overrides: list[str]) -> None:
    config = load_config(DetachedConfig, broken_detached_rules, overrides, "toy", str(FOLDER))
    steps = config.trainer.total_training_steps
    assert steps is not None, "toy.yaml sets it"
    start_ray(None, config.ray_kwargs.ray_init.num_cpus)

    def data_loader_fn() -> PromptLoader:
        return PromptLoader.of(
            config, load_dataset(config, load_tokenizer(config.actor_rollout_ref.model), "train")
        )

    ledger_class = ray.remote(PromptLedger)
    trainer_class = DetachedPPOTrainer
    maker_class = ExperienceMakerHolder
    ledger: Any = ledger_class.options(name="ledger", num_cpus=0).remote(
        steps, config.data.train_batch_size, config.detached
    )
    # Several trainers meet at the address, where this process would hold a TCPStore.
    env_info = {"rank": 0, "world_size": 1, "master_addr": "127.0.0.1", "master_port": 0}
    trainer: Any = trainer_class.options(name="trainer_0", num_cpus=0).remote(  # type: ignore[attr-defined]
        config,
        experience_maker_holder_name_list=["maker_0"],
        model_fn=trainer_models,
        env_info=env_info,
    )
    maker: Any = maker_class.options(name="maker_0", num_cpus=0).remote(  # type: ignore[attr-defined]
        config, detached_trainer_name_list=["trainer_0"], model_fn=maker_models, env_info=env_info
    )
    loops = [trainer.fit.remote(total_steps=steps, update_steps=1, train_epochs=1)]
    loops.append(maker.workingloop.remote(data_loader_fn(), num_steps=None))
    version, num_batches = ray.get(loops, timeout=30 * MINUTES)
    ray.get(maker.finish.remote(version), timeout=5 * MINUTES)
    for step, metrics, *_ in ray.get(maker.report.remote(), timeout=MINUTES).rows:
        scores = {
            name: round(metric.value, 3)
            for name, metric in metrics.items()
            if name.startswith("val-core/")
        }
        print(f"step {step}: {scores}")
    print(f"{num_batches} batches of experience, weights of version {version}")
    print(ray.get(ledger.counts.remote(), timeout=MINUTES))
    end_ray(keep_logs=False)


if __name__ == "__main__":
    main(sys.argv[1:])
