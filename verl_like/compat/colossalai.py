"""PPO by the statements of ColossalAI's `chatgpt` package: a strategy, models, `PPOTrainer`, `fit`.
What runs is `main_ppo`'s."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl_like.claims import claim, remove_abandoned
from verl_like.compat.models import Actor, Critic, Model, RewardModel
from verl_like.compat.strategies import DDPStrategy, FsdpStrategy, NaiveStrategy, Strategy
from verl_like.export import ADAPTER, export
from verl_like.train import TrainedRun
from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.config.roles import Role
from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.ppo.inputs import PPOInputs
from verl_like.trainer.ppo.local_trainer import LocalTrainer
from verl_like.trainer.ppo.ray_trainer import get_trainer
from verl_like.trainer.ppo.run_ppo import check_ppo_inputs, run_ppo_or_raise
from verl_like.trainer.run import worker_template
from verl_like.trainer.run.run_recorder import RunRecorder

__all__ = [
    "Actor",
    "Critic",
    "DDPStrategy",
    "FsdpStrategy",
    "NaiveStrategy",
    "PPOTrainer",
    "RewardModel",
    "Strategy",
]

TEXT_ALONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template for a tokenizer that has none."""
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False}
"""How `fit` trains, whatever the learning rate and the weight decay are."""


class PPOTrainer:
    """PPO with a reward model or, where that is None, by the rules of the rows.

    Args:
        initial_model: the reference of the KL penalty in the reward, whose weight is `kl_coef`.
        actor_optim, critic_optim: give learning rates and weight decays.
        train_batch_size: prompts of an optimizer step; `max_epochs` passes go over the experience.
        experience_batch_size: prompts of a timestep of `fit`.
        max_length: most tokens of prompt and response together.
        overrides: further keys of docs/config.md, each `key=value`.
    """

    def __init__(
        self,
        strategy: Strategy,
        actor: Actor,
        critic: Critic,
        reward_model: RewardModel | None,
        initial_model: Actor,
        actor_optim: torch.optim.Optimizer,
        critic_optim: torch.optim.Optimizer,
        kl_coef: float = 0.1,
        train_batch_size: int = 8,
        *,
        tokenizer: PreTrainedTokenizerBase,
        experience_batch_size: int = 8,
        max_epochs: int = 1,
        max_length: int = 128,
        overrides: Sequence[str] = (),
    ) -> None:
        self.strategy = strategy
        self.experience_batch_size = experience_batch_size
        self.max_length = max_length
        self.models = {"actor": actor, "critic": critic, "ref": initial_model}
        if reward_model:
            self.models["reward_model"] = reward_model
        self.optimizers: dict[str, Any] = {Role.Actor: actor_optim, Role.Critic: critic_optim}
        self.overrides = overrides
        self.tokenizer = deepcopy(tokenizer)
        if not tokenizer.chat_template:
            self.tokenizer.chat_template = TEXT_ALONE
        self.settings = {
            "trainer.n_gpus_per_node": strategy.num_processes,
            "trainer.seed": strategy.seed,
            "trainer.experiment_name": "python",
            "trainer.val_before_train": False,
            # Each fit is a run of its own, on this machine.
            "trainer.resume_mode": "disable",
            "ray_kwargs.ray_init.address": "local",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": kl_coef,
            "actor_rollout_ref.actor.ppo_mini_batch_size": train_batch_size,
            "actor_rollout_ref.actor.ppo_epochs": max_epochs,
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.rollout.name": "hf",
            "reward_model.enable": reward_model is not None,
            # Under an adapter the actor may have other weights than `initial_model`.
            "worker_classes.ref": "verl_like.workers.reference.ReferenceWorker",
        }

    def fit(
        self,
        dataset: Sequence[Any],
        num_episodes: int = 1,
        max_timesteps: int = 10,
        update_timesteps: int = 1,
    ) -> list[dict[str, float]]:
        """Trains on prompts: texts, or rows as in docs/data.md.

        An episode has `max_timesteps` timesteps, and every `update_timesteps` of them are a
        training step. Then models and optimizers have what was learnt. The run's folder is below
        `outputs/`. Returns its metrics by step.

        Raises ValueError for what cannot be, such as an optimizer other than AdamW of all
        parameters with the settings `ADAMW`, and RunFailed if a part of the run fails.
        """
        num_steps = num_episodes * max_timesteps // update_timesteps
        has_gpus = self.strategy.device == "cuda"
        is_local = not has_gpus and self.strategy.name == NaiveStrategy.name
        with temporary_folder() as folder:
            config = self.write_inputs(folder, dataset, num_steps, update_timesteps)
            template = None
            if not has_gpus and not is_local:  # as the command starts workers
                template = worker_template.start(WORKERS)

            def check_inputs(config: PPOConfig, cleanup: contextlib.ExitStack) -> PPOInputs:
                return with_own_reference(check_ppo_inputs(config, cleanup), folder)

            fit = partial(self.fit_checked, is_local=is_local)
            run_dir = run_ppo_or_raise(config, template, check_inputs, fit, uses_ray=not is_local)
            run = TrainedRun.of(run_dir)
            if run.checkpoint:  # None if the run only validated
                self.take_over(run.checkpoint, folder)
        return run.metrics

    def fit_checked(self, inputs: PPOInputs, recorder: RunRecorder, is_local: bool) -> None:
        """Trains on checked inputs, from the states of the optimizers that there are."""
        trainer_class: Any = get_trainer()
        if is_local:
            trainer_class = type("Trainer", (LocalTrainer, trainer_class), {})
        trainer = trainer_class.of(inputs, recorder)
        trainer.init_workers()
        with contextlib.ExitStack() as cleanup:
            for group in trainer.groups.values():
                cleanup.callback(group.shutdown)
            for role, group in trainer.trained.items():
                state_folder = getattr(self.optimizers[role], "state_folder", None)
                if state_folder:
                    group.load_checkpoint(str(state_folder), optimizer_only=True)
            trainer.fit()

    def take_over(self, checkpoint: Path, folder: Path) -> None:
        """Reads what was trained into the models and optimizers."""
        for role, optimizer in self.optimizers.items():
            saved = checkpoint / role
            if not saved.is_dir():  # the run has no such role
                continue
            trained = folder / f"trained_{role}"
            export(saved, trained, "float32")
            model = self.models[role]
            self.strategy.load_model(model, str(trained))
            state_folder = saved / "checkpoint"
            # An adapter is merged into the model, and the next fit begins another one.
            has_adapter = (state_folder / ADAPTER).is_file()
            optimizer.state_folder = None if has_adapter else state_folder

    def write_inputs(
        self, folder: Path, dataset: Sequence[Any], num_steps: int, update_timesteps: int
    ) -> PPOConfig:
        """Writes models and prompts; returns the configuration of a run on them."""
        settings = self.settings | self.settings_of_optimizers()
        for name, model in self.models.items():
            model.hf.save_pretrained(folder / name)
            self.tokenizer.save_pretrained(folder / name)
        prompts_file = folder / "prompts.jsonl"
        rows = [row if isinstance(row, Mapping) else row_of_text(row) for row in dataset]
        lines = [json.dumps(row) for row in rows]
        prompts_file.write_text("\n".join(lines))
        chats: Any = [row["prompt"] for row in rows]
        encoded: Any = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True
        )
        longest = max(map(len, encoded["input_ids"]))
        settings |= {
            "data.train_files": str(prompts_file),
            "data.val_files": str(prompts_file),
            "data.train_batch_size": self.experience_batch_size * update_timesteps,
            "data.max_prompt_length": longest,
            "data.max_response_length": self.max_length - longest,
            "trainer.total_training_steps": num_steps,
            "actor_rollout_ref.model.path": f"{folder}/actor",
            "critic.model.path": f"{folder}/critic",
            "reward_model.model.path": f"{folder}/reward_model",
        }
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        return load_ppo_config([f"device={self.strategy.device}", *overrides, *self.overrides])

    def settings_of_optimizers(self) -> dict[str, Any]:
        """What the optimizers and the strategy say of the training. Raises ValueError for an
        optimizer that `fit` does not have."""
        settings = {}
        for role, key, fsdp in (
            (Role.Actor, "actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config"),
            (Role.Critic, "critic", "critic.model.fsdp_config"),
        ):
            optimizer = self.optimizers[role]
            require_adamw_of_all(optimizer, self.models[role], role)
            group = optimizer.param_groups[0]
            settings[f"{key}.optim.lr"] = group["lr"]
            settings[f"{key}.optim.weight_decay"] = group["weight_decay"]
            settings[f"{fsdp}.param_offload"] = self.strategy.offload
            settings[f"{fsdp}.optimizer_offload"] = self.strategy.offload
            settings[f"{fsdp}.strategy"] = self.strategy.name
        return settings


def require_adamw_of_all(optimizer: torch.optim.Optimizer, model: Model, role: str) -> None:
    """Raises ValueError unless the optimizer is torch's AdamW of all parameters of the model, none
    of which is frozen, with the settings `ADAMW`. Learning rate and weight decay are free."""
    parameters = set(model.parameters())
    group, *others = optimizer.param_groups
    is_whole = not others and set(group["params"]) == parameters
    is_trained = all(parameter.requires_grad for parameter in parameters)
    is_adamw = type(optimizer) is torch.optim.AdamW
    if not (is_whole and is_trained and is_adamw and ADAMW.items() <= group.items()):
        raise ValueError(
            f"fit trains all parameters of the {role} as one group by torch's AdamW with "
            f"{ADAMW}: give AdamW(model.parameters(), ...) and freeze none, and not {optimizer}"
        )


def row_of_text(text: str) -> dict[str, Any]:
    """The row of prompt data for a prompt that is a text."""
    prompt = [{"role": "user", "content": text}]
    return {"data_source": "text", "reward_model": {"style": "model"}, "prompt": prompt}


def with_own_reference(inputs: PPOInputs, folder: Path) -> PPOInputs:
    """Has the reference begin with weights of its own, for the actor may begin with others."""
    reference = inputs.role_worker_mapping.get(Role.RefPolicy)
    if reference:
        policy = inputs.config.actor_rollout_ref
        reference.kwargs["config"] = policy.updated({"model.path": f"{folder}/ref"})
    return inputs


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for models and prompts during a run. Those that killed processes left are
    removed."""
    remove_abandoned(Path(tempfile.gettempdir()), "verl_like_*")
    with tempfile.TemporaryDirectory(prefix="verl_like_") as name:
        folder = Path(name)
        with claim(folder):
            yield folder
