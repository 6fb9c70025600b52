"""PPO from Python, without configuration files: a strategy, models, `PPOTrainer`, and its `fit`,
which runs the trainer of `main_ppo`."""

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
from verl_like.trainer.run.rows import readable_rows
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state.checkpoint import folder_of_step
from verl_like.workers.models.hub import require_hub_model
from verl_like.workers.models.packed_models import head_name

TEXT_ALONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template for a tokenizer that has none."""
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False}
"""The settings of AdamW with which `fit` trains. Learning rate and weight decay can be chosen."""


class LocalTrainer(RayPPOTrainer):
    """The trainer with workers that are objects in this process."""

    def start_groups(self) -> dict[str, WorkerGroup]:
        groups: dict[str, WorkerGroup] = {}
        for role, worker_class in self.role_worker_mapping.items():
            groups[role] = LocalWorkerGroup(worker_class, role=role, on_call=self.recorder.record)
        return groups


class Model(nn.Module):
    """A transformers model in host memory, in float32 and without dropout.

    Its weights are those of `pretrained`, a folder or the name of a model on the hub, or random
    ones for the model that `config` describes. Without both, it is made from the same source as the
    last actor in `model_init_context`.
    """

    auto_class: ClassVar[Any]
    source: ClassVar[str | PretrainedConfig | None] = None
    """What the last actor was made from."""

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
        if isinstance(source, str):
            if not Path(source).is_dir():
                require_hub_model(source, f"{type(self).__name__}(pretrained={source!r})")
            made = AutoConfig.from_pretrained(source)
        else:
            made = deepcopy(source)
        if self.auto_class is AutoModelForCausalLM:
            Model.source = source
        else:
            made.num_labels = 1
        for name, value in dict(vars(made)).items():
            if "drop" in name and isinstance(value, float):
                setattr(made, name, 0.0)
        self.hf: PreTrainedModel
        if isinstance(source, str):
            self.hf = self.auto_class.from_pretrained(source, config=made, dtype=torch.float32)
        else:
            self.hf = self.auto_class.from_config(made, dtype=torch.float32)

    @property
    def model(self) -> nn.Module:
        """The model below its head."""
        return self.hf.base_model

    def cuda(self, device: Any = None) -> "Model":
        """Returns the model as it is, because `fit` places the models."""
        return self


class Actor(Model):
    """A policy. `deepcopy(actor)` makes its reference model."""

    auto_class = AutoModelForCausalLM


class Critic(Model):
    """A model that estimates a value at each token."""

    auto_class = AutoModelForTokenClassification

    @property
    def value_head(self) -> nn.Module:
        return self.hf.get_submodule(head_name(self.hf))


class RewardModel(Model):
    """A model that scores a response at its last token. It is `pretrained`, or has the weights of a
    critic's `model` and of its `value_head`, which must have no bias."""

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
    """Says how many processes train, and by its name what each of them holds (docs/memory.md).

    Args:
        num_processes: by default one for each GPU, or two if there is no GPU.
        offload: True if parameters and Adam's state are in host memory while they are not used.
        seed: the seed of new weights, of the order of the prompts, and of sampling. ValueError is
            raised unless it is below 2^32.
    """

    name = "ddp"
    """The value of the key `fsdp_config.strategy`."""

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
        """Makes random weights of new models follow from the seed."""
        Model.source = None
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            yield

    def prepare(self, *given: Any) -> Any:
        """Returns the models and the pairs of (model, optimizer) as they are, because `fit` places
        them."""
        return given if len(given) > 1 else given[0]

    def save_model(self, model: Model, path: str, only_rank0: bool = True) -> None:
        """Writes the model in float32 to a folder that transformers loads."""
        if not only_rank0:
            raise ValueError(
                "save_model with only_rank0=False: every rank would write the same; leave it True"
            )
        model.hf.save_pretrained(path)

    def load_model(self, model: Model, path: str, strict: bool = True) -> None:
        """Loads weights from a folder of transformers. Parameters that the folder does not have
        stay as they are; with `strict`, ValueError is raised instead."""
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
        weights = there.state_dict()
        for name in missing:
            weights.pop(name, None)
        model.hf.load_state_dict(weights, strict=False)

    def save_optimizer(self, optimizer: Any, path: str, only_rank0: bool = False) -> None:
        """Writes the optimizer's state to a folder, as one file for each rank."""
        if only_rank0 or not getattr(optimizer, "state_folder", None):
            raise ValueError(
                f"save_optimizer with only_rank0={only_rank0}: each rank writes its shard of what "
                "fit left, where it trained no adapter; call it after such a fit, with "
                "only_rank0=False"
            )
        shutil.copytree(optimizer.state_folder, path, dirs_exist_ok=True)
        for file in Path(path).glob("rank_*.safetensors"):
            if not (optimizer.state_folder / file.name).exists():
                file.unlink()  # an earlier save by more ranks wrote it

    def load_optimizer(self, optimizer: Any, path: str) -> None:
        """Has `fit` start with the moments that `save_optimizer` wrote. The strategy may be
        another."""
        if not any(Path(path).glob("*.safetensors")):
            raise ValueError(
                f"load_optimizer: {path} has no safetensors file; give a folder that "
                "save_optimizer wrote"
            )
        optimizer.state_folder = Path(path)


class NaiveStrategy(Strategy):
    """One process. Without a GPU it is this process."""

    name = "single"

    def __init__(self, offload: bool = False, seed: int = 42) -> None:
        super().__init__(1, offload, seed)


class DDPStrategy(Strategy):
    """Each process holds the whole model and the whole state of Adam."""


class FsdpStrategy(Strategy):
    """Each process holds shards, as ZeRO does in the `stage` from 1 to 3."""

    def __init__(self, stage: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.name = f"zero{stage}"


class PPOTrainer:
    """PPO with a reward model, or without one by the rule rewards of the rows' data sources.

    Args:
        initial_model: the reference model of the KL penalty in the reward. `kl_coef` is the weight
            of the penalty.
        actor_optim, critic_optim: give the learning rates and weight decays.
        train_batch_size: the number of prompts of an optimizer step.
        experience_batch_size: the number of prompts of a timestep of `fit`.
        max_epochs: the number of passes over the experience.
        max_length: the limit of prompt and response together, in tokens.
        overrides: further keys of docs/config.md, each as `key=value`.
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
        if reward_model:
            self.models["reward_model"] = reward_model
        self.optimizers: dict[str, Any] = {Role.Actor: actor_optim, Role.Critic: critic_optim}
        self.overrides = overrides
        self.tokenizer = deepcopy(tokenizer)
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
            # The reference has a worker of its own even if the actor has an adapter, because the
            # actor without its adapter may have other weights than `initial_model`.
            "worker_classes.ref": "verl_like.workers.reference.ReferenceWorker",
        }

    def fit(
        self,
        dataset: Sequence[Any],
        num_episodes: int = 1,
        max_timesteps: int = 10,
        update_timesteps: int = 1,
    ) -> list[dict[str, float]]:
        """Trains on prompts, which are texts or rows as in docs/data.md.

        An episode has `max_timesteps` timesteps, and every `update_timesteps` of them are a
        training step. Afterwards the models and optimizers have what was learned. The run's folder
        is below `outputs/`. Returns the rows of the run's metrics.

        Raises ValueError for input that cannot be used, such as an optimizer other than AdamW of
        all parameters with its default settings.
        """
        num_steps = num_episodes * max_timesteps // update_timesteps
        on_cpu = self.strategy.device == "cpu"
        is_local = on_cpu and self.strategy.name == "single"
        with contextlib.ExitStack() as cleanup:
            remove_abandoned(Path(tempfile.gettempdir()), "verl_like_*")
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="verl_like_")))
            cleanup.callback(claim(folder).close)
            template = None
            if on_cpu and not is_local:
                template = worker_template.start(WORKERS)
                cleanup.callback(template.close)
            written = self.write_inputs(folder, dataset, num_steps, update_timesteps)
            inputs = check_ppo_inputs(written, cleanup)
            config = inputs.config
            check_memory(config)
            if reference := inputs.role_worker_mapping.get(Role.RefPolicy):
                # The actor may start with other weights than the reference.
                path_of_reference = {"model.path": f"{folder}/ref"}
                reference.kwargs["config"] = config.actor_rollout_ref.updated(path_of_reference)
            if not is_local:
                num_cpus = config.ray_kwargs.ray_init.num_cpus
                start_ray(None, num_cpus, template.command if template else None)
                cleanup.push(lambda kind, *_: end_ray(keep_logs=kind is not None))
            recorder = RunRecorder(config, PPO_DISPLAY)
            # It is closed before Ray ends, because workers may still be writing a checkpoint.
            cleanup.callback(recorder.close, "Ended.")
            trainer_class: Any = get_trainer()
            if is_local:
                trainer_class = type("Trainer", (LocalTrainer, trainer_class), {})
            trainer = trainer_class.of(inputs, recorder)
            trainer.init_workers()
            for group in trainer.groups.values():
                cleanup.callback(group.shutdown)
            for role, group in trainer.trained.items():
                if folder_before := getattr(self.optimizers[role], "state_folder", None):
                    group.load_checkpoint(str(folder_before), optimizer_only=True)
            trainer.fit()
            last_checkpoint = folder_of_step(recorder.run_dir, config.num_steps_of_run)
            for role in trainer.trained:
                self.take_over(role, last_checkpoint / role, folder / f"trained_{role}")
        return readable_rows((recorder.run_dir / "metrics.jsonl").read_bytes())

    def take_over(self, role: str, saved: Path, exported: Path) -> None:
        """Loads the trained weights of a role from its checkpoint into its model, by way of the new
        folder `exported`, and notes where the state of its optimizer is."""
        export(saved, exported, "float32")
        self.strategy.load_model(self.models[role], str(exported))
        # An adapter is merged into the model by the export, and the next `fit` makes a new one.
        has_adapter = (saved / "checkpoint" / ADAPTER).is_file()
        self.optimizers[role].state_folder = None if has_adapter else saved / "checkpoint"

    def write_inputs(
        self, folder: Path, dataset: Sequence[Any], num_steps: int, update_timesteps: int
    ) -> PPOConfig:
        """Writes the models and prompts to a folder, and returns the configuration of a run on
        them."""
        settings = dict(self.settings)
        settings |= self.training_settings(Role.Actor, "actor_rollout_ref.actor", "fsdp_config")
        settings |= self.training_settings(Role.Critic, "critic", "model.fsdp_config")
        for name, model in self.models.items():
            model.hf.save_pretrained(folder / name)
            self.tokenizer.save_pretrained(folder / name)
        rows: list[Mapping[str, Any]] = []
        for row in dataset:
            if not isinstance(row, Mapping):
                row = {
                    "data_source": "text",
                    "reward_model": {"style": "model"},
                    "prompt": [{"role": "user", "content": row}],
                }
            rows.append(row)
        lines = [json.dumps(row) for row in rows]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        chats: Any = [row["prompt"] for row in rows]
        encoded: Any = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True
        )
        longest = max(len(ids) for ids in encoded["input_ids"])
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

    def training_settings(self, role: str, block: str, fsdp: str) -> dict[str, Any]:
        """The keys that say how a role is trained, as its optimizer and the strategy want it.

        Args:
            block: the key of the role's block.
            fsdp: the key of its fsdp_config within that block.

        Raises:
            ValueError: `fit` cannot train as the optimizer says.
        """
        optimizer = self.optimizers[role]
        parameters = set(self.models[role].parameters())
        group = optimizer.param_groups[0]
        trains_all = (
            len(optimizer.param_groups) == 1
            and set(group["params"]) == parameters
            and all(parameter.requires_grad for parameter in parameters)
        )
        has_defaults = ADAMW.items() <= group.items()
        if type(optimizer) is not torch.optim.AdamW or not trains_all or not has_defaults:
            raise ValueError(
                f"fit trains all parameters of the {role} as one group by torch's AdamW with "
                f"{ADAMW}: give AdamW(model.parameters(), ...) and freeze none, and not "
                f"{optimizer}"
            )
        return {
            f"{block}.optim.lr": group["lr"],
            f"{block}.optim.weight_decay": group["weight_decay"],
            f"{block}.{fsdp}.param_offload": self.strategy.offload,
            f"{block}.{fsdp}.optimizer_offload": self.strategy.offload,
            f"{block}.{fsdp}.strategy": self.strategy.name,
        }
