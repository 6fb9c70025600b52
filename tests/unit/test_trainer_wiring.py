"""From the configuration to what the workers, the data and the reward processes are made with."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl_like.protocol import DataProto, Metric, metric_values
from verl_like.protocol.padded import padded
from verl_like.rewards.manager import RewardSample
from verl_like.single_controller.worker import Worker
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.ppo import inputs as ppo_inputs
from verl_like.trainer.ppo import workers as ppo_workers
from verl_like.trainer.ppo.experience_maker import Generated
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, of_step, read_generated
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.models.pretrained import load_tokenizer
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker
from verl_like.workers.rollout_worker import RolloutWorker
from verl_like.workers.teacher import TeacherWorker

NEEDED = [
    "data.train_files=t",
    "data.val_files=v",
    "actor_rollout_ref.model.path=policy",
    "device=cpu",
]


def config_of(*settings: str) -> PPOConfig:
    return load_ppo_config([*NEEDED, *settings])


class Judge(Worker):
    pass


class OwnCritic(CriticWorker):
    pass


def test_each_role_gets_its_class_and_the_settings_that_it_reads():
    roles = [
        "worker_classes.judge=any.Judge",
        "role_mapping.judge=critic_pool",
        "reward_model.enable=true",
    ]
    settings = ["placement=split", "trainer.n_gpus_per_node=4", "algorithm.use_kl_in_reward=true"]
    loss = "actor_rollout_ref.actor.policy_loss"
    settings += [
        f"{loss}.loss_mode=distillation",
        f"{loss}.teacher_path=large",
        "role_mapping.teacher=critic_pool",
    ]
    settings += ["trainer.seed=7", "trainer.total_training_steps=20", "trainer.critic_warmup=3"]
    settings += ["actor_rollout_ref.rollout.n=5", "actor_rollout_ref.rollout.weight_transport=gloo"]
    config = config_of(
        *settings, *roles, "role_mapping.ref=critic_pool", "reward_model.model.path=judge"
    )
    mapping = ppo_workers.build_role_worker_mapping(config, {"judge": Judge, "critic": OwnCritic})
    assert {role: made.cls for role, made in mapping.items()} == {
        "actor": ActorWorker,
        "rollout": RolloutWorker,
        "ref": ReferenceWorker,
        "teacher": TeacherWorker,
        "critic": OwnCritic,
        "reward_model": RewardModelWorker,
        "judge": Judge,
    }
    assert all(made.args == () for made in mapping.values())
    # The actor is trained in all but the first three of 20 steps; it alone shares the pool with the
    # rollout.
    policy = {"config": config.actor_rollout_ref}
    critic = {"config": config.critic, "seed": 7, "rollout_n": 5, "total_training_steps": 20}
    critic |= {"weight_transport": "gloo"}
    assert {role: made.kwargs for role, made in mapping.items()} == {
        "actor": policy | {"total_training_steps": 17, "shares_device": True},
        "rollout": policy | {"seed": 7},
        "ref": policy | {"shares_device": False},
        "teacher": policy | {"shares_device": False},
        "critic": critic | {"shares_device": False},
        "reward_model": {"config": config.reward_model, "shares_device": False},
        "judge": {"config": config},
    }


def test_a_further_reward_model_has_the_class_of_the_first_and_names_its_own_key():
    class OwnRewardModel(RewardModelWorker):
        pass

    models = [
        "reward_model.enable=true",
        "reward_model.model.path=judge",
        "reward_models.safety.path=missing/no/model",
    ]
    config = config_of(*models, "placement=split", "role_mapping.safety=actor_rollout_ref_pool")
    mapping = ppo_workers.build_role_worker_mapping(config, {"reward_model": OwnRewardModel})
    assert mapping["reward_model"].cls is mapping["safety"].cls is OwnRewardModel
    assert mapping["reward_model"].kwargs == {"config": config.reward_model, "shares_device": False}
    safety = {
        "config": config.plan.reward_models_by_role["safety"],
        "model_key": "reward_models.safety",
    }
    assert mapping["safety"].kwargs == safety | {"shares_device": True}
    with pytest.raises(
        ValueError, match=r"^reward_models\.safety\.path=missing/no/model: there is no model"
    ):
        OwnRewardModel(**mapping["safety"].kwargs).build_model(True)


def test_a_role_without_a_class_of_its_own_is_a_plain_worker_with_the_whole_configuration():
    config = config_of("worker_classes.judge=any.Judge", "role_mapping.judge=global_pool")
    made = ppo_workers.build_role_worker_mapping(config, {})["judge"]
    assert made.cls is Worker and made.kwargs == {"config": config}
    # Without a number of steps nothing can be taken off it.
    assert (
        ppo_workers.build_role_worker_mapping(config, {})["actor"].kwargs["total_training_steps"]
        is None
    )


def test_training_roles_share_a_process_and_the_rollout_has_its_own():
    assert ppo_workers.build_resource_pools(config_of()).max_colocate_count == 2
    split = ["placement=split", "trainer.n_gpus_per_node=4"]
    own_pools = ["role_mapping.rollout=rollout_pool", "resource_pool_spec.rollout_pool=[1]"]
    assert ppo_workers.build_resource_pools(config_of(*split)).max_colocate_count == 2
    assert ppo_workers.build_resource_pools(config_of(*split, *own_pools)).max_colocate_count == 1


def test_epochs_count_whole_batches_unless_the_number_of_steps_is_given():
    batches = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    micro = [
        f"{part}.ppo_micro_batch_size_per_gpu=2" for part in ("actor_rollout_ref.actor", "critic")
    ]
    config = config_of(*batches, *micro, "trainer.total_epochs=3")
    assert (
        ppo_inputs.with_training_steps(config, num_prompts=11).trainer.total_training_steps == 2 * 3
    )
    given = config_of(*batches, *micro, "trainer.total_epochs=3", "trainer.total_training_steps=5")
    assert ppo_inputs.with_training_steps(given, num_prompts=11).trainer.total_training_steps == 5


def test_the_datasets_are_read_as_the_data_settings_say(tmp_path: Path, tiny_llama: Callable):
    def rows(name: str, *questions: str) -> str:
        lines = [
            {
                "question": [{"role": "user", "content": question}],
                "source": name,
                "reward_model": {"ground_truth": "1"},
            }
            for question in questions
        ]
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
        return str(tmp_path / name)

    files = [
        rows("a.jsonl", "1+1", "123+123"),
        rows("b.jsonl", "2+2", "3+3"),
        rows("c.jsonl", "4+4", "5+5", "6+6"),
    ]
    config = config_of(
        f"data.train_files=[{files[0]},{files[1]}]",
        f"data.val_files={files[2]}",
        "data.prompt_key=question",
        "data.reward_fn_key=source",
        "data.max_prompt_length=5",
        "data.filter_overlong_prompts=true",
        "data.train_max_samples=3",
        "data.val_max_samples=2",
        "data.apply_chat_template_kwargs={sign: '-'}",
    )
    path, _ = tiny_llama()
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.model_copy(update={"path": path}))
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ sign }}"
    )
    train, val = (ppo_inputs.load_dataset(config, tokenizer, part) for part in ("train", "val"))
    # Of the first three rows of both files the long one is left out.
    assert [train[i]["data_source"] for i in range(len(train))] == [
        "a.jsonl",
        "b.jsonl",
    ] and train.num_filtered == 1
    assert [val[i]["data_source"] for i in range(len(val))] == ["c.jsonl", "c.jsonl"]
    batch = train.collate([train[0], train[1]], epoch=0)
    assert tokenizer.batch_decode(batch.batch["prompts"].unbind()) == ["1+1-", "2+2-"]
    assert batch.meta_info["padding"] == (
        5,
        config.data.max_response_length,
        tokenizer.pad_token_id,
    )
    assert padded(batch).batch["input_ids"].shape == (2, 5)
    truncating = config.model_copy(
        update={
            "data": config.data.model_copy(
                update={"filter_overlong_prompts": False, "truncation": "left"}
            )
        }
    )
    assert ppo_inputs.load_dataset(truncating, tokenizer, "train").num_truncated == 1


def test_the_reward_processes_are_made_as_the_reward_settings_say(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "def grade(solution_str, bonus, **others):\n    return len(solution_str) + bonus\n"
    )
    function = [
        f"custom_reward_function.path={tmp_path}/own.py",
        "custom_reward_function.name=grade",
    ]
    settings = [
        "custom_reward_function.reward_kwargs={bonus: 0.5}",
        "reward.num_workers=3",
        "reward.timeout_s=7",
    ]
    manager = ppo_inputs.start_reward_manager(
        config_of(*function, *settings, "reward.on_error=skip")
    )
    try:
        assert (manager.num_workers, manager.timeout_s, manager.on_error) == (3, 7.0, "skip")
        assert manager.submit([RewardSample("0", "x", "four", "", {})]).get().scores.tolist() == [
            4.5
        ]
    finally:
        manager.close()


def test_the_memory_of_reward_processes_is_limited_by_its_key(tmp_path: Path):
    (tmp_path / "eats.py").write_text("import time\nblock = b'x' * (700 << 20)\ntime.sleep(5)")
    settings = [f"custom_reward_function.path={tmp_path}/eats.py", "reward.max_memory_gb=0.5"]
    with pytest.raises(ValueError, match=r"it used more memory than .*max_memory_gb=0\.5"):
        ppo_inputs.start_reward_manager(config_of(*settings, "reward.num_workers=1"))


class Loading:
    """A group whose model takes two turns to load: it notes when it begins and when somebody waited
    for its end."""

    def __init__(self, role: str, notes: list[str]) -> None:
        self.role, self.notes = role, notes
        self.init_model = self

    def remote(self) -> "Loading":
        self.notes.append(f"{self.role} begins")
        return self

    def get(self) -> None:
        self.notes.append(f"{self.role} is there")


def test_on_a_gpu_the_engine_loads_when_all_that_shares_its_device_is_there_and_on_a_cpu_at_once():
    def notes_of(device: str) -> list[str]:
        notes: list[str] = []
        groups = {role: Loading(role, notes) for role in ("rollout", "ref", "actor_copy")}
        ppo_workers.load_models(groups, device)
        return notes

    others = ["ref begins", "actor_copy begins", "ref is there", "actor_copy is there"]
    assert notes_of("cuda") == [*others, "rollout begins", "rollout is there"]
    assert notes_of("cpu")[:3] == ["rollout begins", "ref begins", "actor_copy begins"]


def test_the_responses_that_a_checkpoint_of_an_earlier_version_holds_are_read(tmp_path):
    in_verls_layout = DataProto.from_dict(
        {
            "prompts": torch.tensor([[0, 5], [6, 7]]),
            "responses": torch.tensor([[8, 9, 0], [10, 0, 0]]),
            "input_ids": torch.tensor([[0, 5, 8, 9, 0], [6, 7, 10, 0, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
            "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
            "rollout_log_probs": torch.tensor([[-0.5, -1.0, 0.0], [-2.0, 0.0, 0.0]]),
        },
        meta_info={"global_steps": 4, "metrics_of_generation": {"rollout/hit": Metric.mean(0.25)}},
    )
    in_verls_layout.save_to_disk(tmp_path / "generated.safetensors")
    generated = read_generated(tmp_path / "generated.safetensors", 0)
    batch = generated.batch
    assert generated.scores is None and metric_values(generated.metrics) == {"rollout/hit": 0.25}
    assert {
        name: [row.tolist() for row in column.unbind()] for name, column in batch.tensors().items()
    } == {
        "prompts": [[5], [6, 7]],
        "responses": [[8, 9], [10]],
        "response_mask": [[1, 1], [1]],
        "rollout_log_probs": [[-0.5, -1.0], [-2.0]],
    }
    assert batch.meta_info == {"global_steps": 4, "padding": (2, 3, 0)}


def test_a_step_numbers_its_prompts_and_leaves_those_that_it_was_given_as_they_are():
    prompts = DataProto.from_dict({"x": torch.ones(2)}, meta_info={"epoch": 3})
    assert of_step(prompts, 7).meta_info == {"epoch": 3, "global_steps": 7}
    assert prompts.meta_info == {"epoch": 3}


class NotingParts:
    """A maker and a learner that note what they are asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.actor = self

    def sample(
        self, prompts: DataProto, more_prompts: object, generation: object = None
    ) -> Generated:
        step = prompts.meta_info["global_steps"]
        self.done.append(f"sample {step}" + (f" of {generation}" if generation else ""))
        return Generated(prompts, None, {})

    def begin(self, prompts: DataProto) -> str:
        self.done.append(f"begin {prompts.meta_info['global_steps']}")
        return "what was begun"

    def complete(self, generated: Generated) -> Experience:
        self.done.append(f"complete {generated.batch.meta_info['global_steps']}")
        return Experience(
            generated.batch,
            None,
            {"maker/step": Metric.max(generated.batch.meta_info["global_steps"])},
        )

    def learn(self, experience: Experience) -> Update:
        self.done.append(f"learn {experience.batch.meta_info['global_steps']}")
        return Update([self], {})

    def export_weights(self) -> str:
        self.done.append("export")
        return "weights"

    def get(self) -> DataProto:
        self.done.append("wait for the update")
        return DataProto()

    def load_weights(self, weights: str, checks_first: bool) -> None:
        self.done.append(f"load {weights}")

    def report_finished_calls(self) -> None:
        pass


def test_the_responses_of_the_next_step_are_begun_before_its_weights_and_collected_while_the_update_runs():
    parts = NotingParts()
    trainer = object.__new__(RayPPOTrainer)
    trainer.config = SimpleNamespace(num_steps_of_run=2, trainer=SimpleNamespace(max_staleness=1))
    trainer.recorder = SimpleNamespace(
        commit_checkpoint=lambda wait: None, timer=lambda phase: nullcontext()
    )
    trainer.maker = trainer.learner = parts
    trainer.generated, trainer.exported, trainer.num_prompt_batches, trainer.upcoming_batch = (
        None,
        None,
        0,
        0,
    )
    trainer.prompts_of = lambda number: DataProto.from_dict(
        {"row": torch.zeros(1)}, meta_info={"epoch": number}
    )
    trainer.metrics_of = lambda experience: parts.done.append("measure") or {}
    rows = []
    for trainer.global_step in (1, 2):
        rows.append({name: metric.value for name, metric in trainer.step().items()})
        assert trainer.exported is None, "nothing keeps the weights that were handed on"
    first = [
        "sample 1",
        "begin 2",
        "complete 1",
        "learn 1",
        "export",
        "measure",
        "sample 2 of what was begun",
    ]
    second = ["complete 2", "learn 2", "export", "measure"]
    handed_on = ["wait for the update", "load weights"]
    assert parts.done == [*first, *handed_on, *second, *handed_on]
    assert rows == [{"maker/step": step, "training/epoch": step - 1} for step in (1, 2)]
    assert isinstance(rows[0]["training/epoch"], int)
    assert (trainer.num_prompt_batches, trainer.upcoming_batch, trainer.generated) == (2, 2, None)
