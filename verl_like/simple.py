"""PPO from Python, without configuration files: a strategy, models, `PPOTrainer`, `fit`. What runs
is `main_ppo`'s."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from verl_like.claims import claim, remove_abandoned
from verl_like.export import ADAPTER, export
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.ray.start import end_ray, start_ray
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.config.roles import Role
from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.memory.pools import check_memory
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, get_trainer
from verl_like.trainer.ppo.run_ppo import check_ppo_inputs
from verl_like.trainer.run import worker_template
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state.checkpoint import folder_of_step
from verl_like.workers.models.hub import require_hub_model
from verl_like.workers.models.packed_models import head_name

TEXT_ALONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template for a tokenizer that has none."""
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False}
"""How `fit` trains, whatever the learning rate and the weight decay are."""


class LocalTrainer(RayPPOTrainer):
    """The same trainer on workers that are objects of this process."""

    def start_groups(self) -> dict[str, WorkerGroup]:
        return {
            role: LocalWorkerGroup(worker_class, role=role, on_call=self.recorder.record)
            for role, worker_class in self.role_worker_mapping.items()
        }


class Model(nn.Module):
    """A transformers model in host memory, in float32 and without dropout.

    It has the weights of `pretrained`, a folder or hub name, or random ones of `config`. Without
    both it is made as the last actor in `model_init_context` was.
    """

    auto_class: ClassVar[Any]
    source: ClassVar[str | PretrainedConfig | None] = None

    def __init__(
        self, pretrained: str | None = None, config: PretrainedConfig | None = None
    ) -> None:
        super().__init__()
        source = pretrained or config or Model.source
        if source is None:
            raise ValueError(
                f"{type(self).__name__}() names no model, and no actor was made before it: give "
                "pretrained=<folder or hub name>, or config=<a configuration of transformers>"
            )
        if isinstance(source, str) and not Path(source).is_dir():
            require_hub_model(source, f"{type(self).__name__}(pretrained={source!r})")
        made = AutoConfig.from_pretrained(source) if isinstance(source, str) else deepcopy(source)
        if self.auto_class is AutoModelForCausalLM:
            Model.source = source
        else:
            made.num_labels = 1
        for name in [
            name
            for name, value in vars(made).items()
            if "drop" in name and isinstance(value, float)
        ]:
            setattr(made, name, 0.0)
        self.hf: PreTrainedModel = (
            self.auto_class.from_pretrained(source, config=made, dtype=torch.float32)
            if isinstance(source, str)
            else self.auto_class.from_config(made, dtype=torch.float32)
        )

    @property
    def model(self) -> nn.Module:
        """The model below its head."""
        return self.hf.base_model

    def cuda(self, device: Any = None) -> "Model":
        """Stays: `fit` places the models."""
        return self


class Actor(Model):
    """A policy; `deepcopy(actor)` is its reference."""

    auto_class = AutoModelForCausalLM


class Critic(Model):
    """A critic."""

    auto_class = AutoModelForTokenClassification

    @property
    def value_head(self) -> nn.Module:
        return self.hf.get_submodule(head_name(self.hf))


class RewardModel(Model):
    """A reward model: `pretrained`, or a critic's model with its head, of no bias, which scores the
    last token."""

    auto_class = AutoModelForSequenceClassification

    def __init__(
        self, model: Any = None, value_head: Any = None, *, pretrained: str | None = None
    ) -> None:
        super().__init__(pretrained, model and model.config)
        if model is not None:
            if value_head.bias is not None and value_head.bias.any():
                raise ValueError(
                    f"RewardModel: the value head has a bias of {value_head.bias.item()}, and a "
                    "reward model's head has none: set it to 0, which moves all scores by as much"
                )
            self.model.load_state_dict(model.state_dict())
            self.hf.get_submodule("score").load_state_dict({"weight": value_head.weight})


class Strategy:
    """Which processes train, and by its name what each of them holds (docs/memory.md).

    Args:
        num_processes: by default one for each GPU, and two where there is none.
        offload: whether parameters and Adam's state are in host memory while they are not used.
        seed: of new weights, the order of the prompts, and sampling; below 2^32, or ValueError is
            raised.
    """

    name = "ddp"

    def __init__(
        self, num_processes: int | None = None, offload: bool = False, seed: int = 42
    ) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(
                f"{type(self).__name__}: seed={seed}, give a number from 0 to 4294967295"
            )
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.num_processes = num_processes or torch.cuda.device_count() or 2
        self.offload = offload
        self.seed = seed

    @contextlib.contextmanager
    def model_init_context(self) -> Iterator[None]:
        """Within it new weights are of the seed."""
        Model.source = None
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            yield

    def prepare(self, *given: Any) -> Any:
        """Returns the models and (model, optimizer) pairs as they are, for `fit` places them."""
        return given if len(given) > 1 else given[0]

    def save_model(self, model: Model, path: str, only_rank0: bool = True) -> None:
        """Writes a folder that transformers loads, in float32."""
        if not only_rank0:
            raise ValueError(
                "save_model with only_rank0=False: every rank would write the same; leave it True"
            )
        model.hf.save_pretrained(path)

    def load_model(self, model: Model, path: str, strict: bool = True) -> None:
        """Reads such a folder. What it does not have stays as it is, or with `strict` raises
        ValueError."""
        model_class: Any = type(model.hf)
        there, report = model_class.from_pretrained(
            path, config=model.hf.config, dtype=torch.float32, output_loading_info=True
        )
        missing = sorted(report["missing_keys"])
        unexpected = sorted(report["unexpected_keys"])
        if strict and (missing or unexpected):
            raise ValueError(
                f"{path} is no {model_class.__name__}: it lacks {missing} and also has "
                f"{unexpected}; give another folder, or strict=False"
            )
        model.hf.load_state_dict(
            {k: v for k, v in there.state_dict().items() if k not in missing}, strict=False
        )

    def save_optimizer(self, optimizer: Any, path: str, only_rank0: bool = False) -> None:
        """Writes the optimizer's state, a file for each rank."""
        if only_rank0 or not getattr(optimizer, "state_folder", None):
            raise ValueError(
                f"save_optimizer with only_rank0={only_rank0}: each rank writes its shard of what "
                "fit left, where it trained no adapter; call it after such a fit, with "
                "only_rank0=False"
            )
        shutil.copytree(optimizer.state_folder, path, dirs_exist_ok=True)
        for file in Path(path).glob("rank_*.safetensors"):
            if not (optimizer.state_folder / file.name).exists():
                file.unlink()  # of an earlier save, by more ranks

    def load_optimizer(self, optimizer: Any, path: str) -> None:
        """Has `fit` start with the moments that `save_optimizer` wrote, under any strategy."""
        if not any(Path(path).glob("*.safetensors")):
            raise ValueError(
                f"load_optimizer: {path} has no safetensors file; give a folder that "
                "save_optimizer wrote"
            )
        optimizer.state_folder = Path(path)


class NaiveStrategy(Strategy):
    """One process: this one where there is no GPU."""

    name = "single"

    def __init__(self, offload: bool = False, seed: int = 42) -> None:
        super().__init__(1, offload, seed)


class DDPStrategy(Strategy):
    """Whole copies."""


class FsdpStrategy(Strategy):
    """Shards, as by ZeRO of a stage from 1 to 3."""

    def __init__(self, stage: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.name = f"zero{stage}"


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
        self.models: dict[str, Model] = {"actor": actor, "critic": critic, "ref": initial_model}
        self.models |= {"reward_model": reward_model} if reward_model else {}
        self.optimizers: dict[str, Any] = {Role.Actor: actor_optim, Role.Critic: critic_optim}
        self.overrides, self.tokenizer = overrides, deepcopy(tokenizer)
        self.tokenizer.chat_template = self.tokenizer.chat_template or TEXT_ALONE
        self.settings = {
            "trainer.n_gpus_per_node": strategy.num_processes,
            "trainer.seed": strategy.seed,
            "trainer.experiment_name": "python",
            "trainer.val_before_train": False,
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
        parameters with its defaults.
        """
        num_steps = num_episodes * max_timesteps // update_timesteps
        with contextlib.ExitStack() as cleanup:
            remove_abandoned(Path(tempfile.gettempdir()), "verl_like_*")
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="verl_like_")))
            cleanup.callback(claim(folder).close)
            is_local = self.strategy.device == "cpu" and self.strategy.name == "single"
            template = None
            if self.strategy.device == "cpu" and not is_local:  # as the command starts workers
                template = worker_template.start(WORKERS)
                cleanup.callback(template.close)
            inputs = check_ppo_inputs(
                self.write_inputs(folder, dataset, num_steps, update_timesteps), cleanup
            )
            config = inputs.config
            check_memory(config)
            if reference := inputs.role_worker_mapping.get(Role.RefPolicy):
                # The actor may start with other weights than the reference.
                reference.kwargs["config"] = config.actor_rollout_ref.updated(
                    {"model.path": f"{folder}/ref"}
                )
            if not is_local:
                start_ray(
                    None,
                    config.ray_kwargs.ray_init.num_cpus,
                    template.command if template else None,
                )
                cleanup.push(lambda kind, *_: end_ray(keep_logs=kind is not None))
            recorder = RunRecorder(config, PPO_DISPLAY)
            # Before Ray ends: workers may be writing a checkpoint
            cleanup.callback(recorder.close, "Ended.")
            trainer_class: Any = get_trainer()
            trainer_class = (
                type("Trainer", (LocalTrainer, trainer_class), {}) if is_local else trainer_class
            )
            trainer = trainer_class.of(inputs, recorder)
            trainer.init_workers()
            for group in trainer.groups.values():
                cleanup.callback(group.shutdown)
            for role, group in trainer.trained.items():
                if folder_before := getattr(self.optimizers[role], "state_folder", None):
                    group.load_checkpoint(str(folder_before), optimizer_only=True)
            trainer.fit()
            for role in trainer.trained:
                saved = folder_of_step(recorder.run_dir, config.num_steps_of_run) / role
                export(saved, folder / f"trained_{role}", "float32")
                self.strategy.load_model(self.models[role], f"{folder}/trained_{role}")
                # Which is merged, and the next one is new
                has_adapter = (saved / "checkpoint" / ADAPTER).is_file()
                self.optimizers[role].state_folder = None if has_adapter else saved / "checkpoint"
        return [
            json.loads(line)
            for line in (recorder.run_dir / "metrics.jsonl").read_text().splitlines()
        ]

    def write_inputs(
        self, folder: Path, dataset: Sequence[Any], num_steps: int, update_timesteps: int
    ) -> PPOConfig:
        """Writes models and prompts; returns the configuration of a run on them."""
        settings = dict(self.settings)
        for role, key, model_key in (
            (Role.Actor, "actor_rollout_ref.actor", ""),
            (Role.Critic, "critic", ".model"),
        ):
            optimizer = self.optimizers[role]
            parameters = {*self.models[role].parameters()}
            (group, *others), fsdp = optimizer.param_groups, f"{key}{model_key}.fsdp_config"
            is_whole = {*group["params"]} == parameters and all(
                parameter.requires_grad for parameter in parameters
            )
            if (
                type(optimizer) is not torch.optim.AdamW
                or others
                or not (is_whole and ADAMW.items() <= group.items())
            ):
                raise ValueError(
                    f"fit trains all parameters of the {role} as one group by torch's AdamW with "
                    f"{ADAMW}: give AdamW(model.parameters(), ...) and freeze none, and not "
                    f"{optimizer}"
                )
            settings |= {f"{key}.optim.{name}": group[name] for name in ("lr", "weight_decay")}
            settings |= {
                f"{fsdp}.{part}_offload": self.strategy.offload for part in ("param", "optimizer")
            }
            settings[f"{fsdp}.strategy"] = self.strategy.name
        for name, model in self.models.items():
            model.hf.save_pretrained(folder / name)
            self.tokenizer.save_pretrained(folder / name)
        texts: dict[str, Any] = {"data_source": "text", "reward_model": {"style": "model"}}
        rows = [
            row
            if isinstance(row, Mapping)
            else texts | {"prompt": [{"role": "user", "content": row}]}
            for row in dataset
        ]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        chats: Any = [row["prompt"] for row in rows]
        encoded: Any = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True
        )
        longest = max(map(len, encoded["input_ids"]))
        settings |= {
            "data.train_files": f"{folder}/prompts.jsonl",
            "data.val_files": f"{folder}/prompts.jsonl",
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
