"""The configuration of detached training: its rules, and what of it each side reads."""

import contextlib
import shlex
from pathlib import Path

import pytest

from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.detached.maker_holder import check_maker
from verl_like.trainer.detached.run_detached import check_detached_inputs, check_trainer
from verl_like.trainer.ppo import maker_driver
from verl_like.trainer.ppo import ray_trainer as ppo_trainer
from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.maker_driver import OF_PLUGIN, MakerDriver
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, get_trainer, register_trainer
from verl_like.trainer.ppo.run_ppo import check_ppo_inputs
from verl_like.trainer.ppo.workers import build_role_worker_mapping
from verl_like.workers.rollout_worker import RolloutWorker


class BeginningMaker(ExperienceMaker):
    def begin(self, prompts):
        return super().begin(prompts)


class CompletingMaker(ExperienceMaker):
    def complete(self, generated):
        return super().complete(generated)


class GeneratingWorker(RolloutWorker):
    def generate_sequences(self, prompts):
        return (yield from super().generate_sequences(prompts))


def group_of(worker_class):
    """One worker, whose engine is not started."""
    worker = ClassWithInitArgs(worker_class, config=config_of().actor_rollout_ref, seed=1)
    return LocalWorkerGroup(worker, role="rollout_a")


class TrainerOfOtherPrompts(RayPPOTrainer):
    """With a state, and an order of the prompts that follows it."""

    def state(self):
        return super().state() | {"difficulty": 3}

    def restore(self, checkpoint):
        super().restore(checkpoint)

    def next_prompts(self):
        return self.prompts_of(2)

    def prompts_of(self, number):
        return super().prompts_of(number + 1)


class TrainerOfAnotherMaker(RayPPOTrainer):
    def build_maker(self):
        return CompletingMaker(**vars(super().build_maker()))


class DriverOfAnotherMaker(MakerDriver):
    def build_maker(self):
        return CompletingMaker(**vars(super().build_maker()))


NEEDED = ["data.train_files=a", "data.val_files=a", "actor_rollout_ref.model.path=m", "device=cpu"]
SMALL = [
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=6",
    "actor_rollout_ref.rollout.n=4",
]
SMALL += [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
]

IN_FLIGHT = ["detached.update_in_flight=true", "trainer.max_staleness=1"]
IN_FLIGHT += [
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.rollout.weight_transport=gloo",
]


def config_of(*overrides: str) -> DetachedConfig:
    return load_config(DetachedConfig, broken_detached_rules, [*NEEDED, *SMALL, *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.max_staleness=2"],
            "trainer.max_staleness=2 trains on responses that older weights drew",
        ),
        (["detached.update_steps=2"], "set update_steps to at most 1"),
        (
            ["trainer.val_only=true"],
            "trainer.val_only=true: in detached training a maker validates while trainers train",
        ),
        (
            ["worker_classes.critic=a.Critic"],
            "worker_classes.critic: makers run a copy of the built-in worker",
        ),
        (["detached.min_effective_sample_size=0.5"], "min_effective_sample_size=0.5 has no effect"),
        (
            ["detached.restart_below=9"],
            "restart_below=9 has no effect without detached.update_in_flight=true",
        ),
        (
            [*IN_FLIGHT, "algorithm.adv_estimator=remax"],
            "compares with a greedy response of the same weights",
        ),
        (
            [*IN_FLIGHT, "algorithm.adv_estimator=gpg"],
            "adv_estimator=gpg compares the rows of a batch",
        ),
        (
            [
                *IN_FLIGHT,
                "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            ],
            "loss_mode=clip_cov compares the rows of a batch",
        ),
        (
            [*IN_FLIGHT, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.routing=fixed"],
            "call has one prompt, which the first engine would get each time; set least_loaded",
        ),
        (["detached.update_in_flight=true"], "and trainer.max_staleness of at least 1"),
        (
            ["trainer.best_ckpt_metric=acc", "trainer.test_freq=1"],
            "here validations come after saves; set null",
        ),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=grpo"],
            "which detached makers cannot yet",
        ),
        (
            ["detached.num_trainers=5"],
            "data.train_batch_size=12 does not divide by detached.num_trainers=5",
        ),
        (
            ["placement=split", "trainer.n_gpus_per_node=4"],
            "ref, rollout and a trained role share a pool",
        ),
        (
            ["actor_rollout_ref.rollout.dtype=bfloat16"],
            "a maker's copy of the actor would compute other",
        ),
        (
            ["actor_rollout_ref.rollout.weight_transport=nccl", "trainer.device=cuda"],
            "nccl loads engines alone, but a maker has a copy of the actor",
        ),
        (
            ["actor_rollout_ref.rollout.weight_transport=ipc", "trainer.device=cuda"],
            "ipc opens memory of one GPU, but makers and trainers have GPUs of their own",
        ),
        (
            [
                "detached.num_makers=2",
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_ctrl.type=adaptive",
            ],
            "a maker sees only its own; set fixed",
        ),
    ],
)
def test_what_detached_training_cannot_do_is_refused_with_the_reason(
    overrides: list[str], message: str
):
    if "placement=split" in overrides:
        overrides = [*overrides, "algorithm.use_kl_in_reward=true"]
    with pytest.raises(ConfigError) as refused:
        config_of(*overrides)
    assert message in str(refused.value)


def test_each_side_has_pools_of_its_own_and_a_trainer_its_part_of_the_batch():
    sides = [
        "detached.num_makers=2",
        "detached.num_trainers=3",
        "resource_pool_spec.trainer_pool=[1]",
    ]
    config = config_of(*sides, "actor_rollout_ref.rollout.free_cache_engine=true")
    maker, trainer = config.of_maker("maker_1"), config.of_trainer("trainer_2")
    assert maker.resource_pool_spec == {"maker_1 maker_pool": (2,)}
    assert {maker.role_mapping[role] for role in config.plan.maker_roles} == {"maker_1 maker_pool"}
    assert config.plan.maker_roles == ("actor", "rollout", "critic")
    assert config.plan.trainer_roles == ("actor", "critic")
    assert not maker.actor_rollout_ref.rollout.free_cache_engine, "nothing else wants its memory"
    assert trainer.resource_pool_spec == {"trainer_2 trainer_pool": (1,)}
    sizes = trainer.data.train_batch_size, trainer.actor_rollout_ref.actor.ppo_mini_batch_size
    assert (*sizes, trainer.critic.ppo_mini_batch_size) == (4, 2, 2)
    assert (maker.data.train_batch_size, maker.actor_rollout_ref.actor.ppo_mini_batch_size) == (
        12,
        6,
    )
    assert (
        sum(sum(size) for size in config.with_all_pools().resource_pool_spec.values())
        == 2 * 2 + 3 * 1
    )


@pytest.mark.parametrize(
    ("overrides", "num_parts"),
    [
        ([], 2),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=3"], 4),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=3", "critic.ppo_mini_batch_size=6"], 1),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=12"], 1),
        (["actor_rollout_ref.actor.ppo_epochs=2"], 1),
        (["critic.ppo_epochs=2"], 1),
        (["critic.ppo_epochs=2", "algorithm.adv_estimator=grpo"], 2),
        (["trainer.max_staleness=0"], 1),
    ],
)
def test_a_trainer_takes_a_step_in_mini_batches_where_that_is_the_same_computation(
    overrides: list[str], num_parts: int
):
    ahead = ["trainer.max_staleness=1", "algorithm.rollout_correction.bypass_mode=true"]
    config = config_of(*ahead, *overrides)
    assert config.plan.num_parts_of_step == num_parts
    three = [
        "detached.num_trainers=3",
        "resource_pool_spec.trainer_pool=[1]",
        "actor_rollout_ref.rollout.n=2",
    ]
    assert (
        config_of(*ahead, *overrides, *three).of_trainer("trainer_2").plan.num_parts_of_step
        == num_parts
    )


def test_what_a_rule_is_not_about_is_allowed():
    config_of("trainer.max_staleness=2", "algorithm.rollout_correction.rollout_is=token")
    # One maker sees the KL of all
    config_of("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive")
    no_copy = ["algorithm.rollout_correction.bypass_mode=true", "algorithm.adv_estimator=grpo"]
    config_of(*no_copy, "actor_rollout_ref.rollout.dtype=bfloat16")


@pytest.mark.parametrize(
    ("num_makers", "own", "number"), [(1, "null", 12), (5, "null", 3), (16, "null", 1), (5, "7", 7)]
)
def test_makers_share_a_batch_unless_they_are_told_how_many_prompts_each_has(
    num_makers: int, own: str, number: int
):
    config = config_of(f"detached.num_makers={num_makers}", f"detached.experience_batch_size={own}")
    assert config.plan.num_prompts_at_a_time == number


def test_a_maker_has_no_copy_of_the_actor_where_it_computes_no_log_probabilities():
    config = config_of(
        "algorithm.rollout_correction.bypass_mode=true", "algorithm.adv_estimator=grpo"
    )
    assert config.plan.maker_roles == ("rollout",)
    assert config.plan.trainer_roles == ("actor",)


def test_a_plugin_that_generates_in_its_own_way_is_refused_where_responses_are_updated_in_flight():
    in_flight, rollout = (
        config_of(*IN_FLIGHT, "algorithm.adv_estimator=grpo"),
        group_of(RolloutWorker),
    )
    with pytest.raises(ValueError, match="BeginningMaker has its own begin, which detached"):
        check_maker(in_flight, BeginningMaker, rollout)
    check_maker(in_flight, CompletingMaker, rollout)
    check_maker(config_of(), BeginningMaker, rollout)
    with pytest.raises(
        ValueError,
        match=r"the worker of rollout_a has its own generate_sequences, which detached\.",
    ):
        check_maker(in_flight, CompletingMaker, group_of(GeneratingWorker))
    check_maker(config_of(), CompletingMaker, group_of(GeneratingWorker))


def test_responses_may_be_updated_in_flight_in_the_engine_that_computes_in_a_process_of_its_own():
    own_process = ["actor_rollout_ref.rollout.name=vllm_async", "algorithm.adv_estimator=grpo"]
    rollout = config_of(*IN_FLIGHT, *own_process).actor_rollout_ref.rollout
    assert (rollout.name, rollout.routing) == ("vllm_async", "least_loaded")


def test_a_plugins_trainer_whose_methods_no_maker_would_call_is_refused_before_its_inputs_are_read(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ppo_trainer.TRAINERS, "entries", {OF_PLUGIN: TrainerOfOtherPrompts})
    message = (
        "call the plugin's trainer TrainerOfOtherPrompts, which has its own next_prompts, "
        "prompts_of, restore, st"
    )
    with contextlib.ExitStack() as cleanup, pytest.raises(ValueError, match=message):
        check_detached_inputs(config_of(), cleanup)
    learning = type("LearningTrainer", (RayPPOTrainer,), {"build_learner": lambda self: None})
    with pytest.raises(
        ValueError,
        match=r"LearningTrainer, which has its own build_learner: train with main_ppo, or",
    ):
        check_trainer(learning)
    advice = (
        r"give build_maker to a subclass of MakerDriver that is registered with "
        r"register_maker_driver of"
    )
    with pytest.raises(ValueError, match=advice):
        check_trainer(TrainerOfAnotherMaker)
    started = type("StartedTrainer", (RayPPOTrainer,), {"__post_init__": lambda self: None})
    with pytest.raises(
        ValueError, match=r"StartedTrainer, which has its own __post_init__: train with main_ppo"
    ):
        check_trainer(started)
    with pytest.raises(
        ValueError, match=r"does not call the plugin's trainer PlainTrainer: train with main_ppo"
    ):
        check_trainer(type("PlainTrainer", (RayPPOTrainer,), {}))
    check_trainer(RayPPOTrainer)


def test_a_plugin_with_the_same_maker_for_both_kinds_of_training_has_a_driver_and_a_trainer(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(maker_driver.DRIVERS, "entries", {OF_PLUGIN: DriverOfAnotherMaker})
    check_trainer(TrainerOfAnotherMaker)
    with pytest.raises(ValueError, match="TrainerOfOtherPrompts, which has its own next_prompts"):
        check_trainer(TrainerOfOtherPrompts)
    monkeypatch.setattr(ppo_trainer.TRAINERS, "entries", {OF_PLUGIN: TrainerOfAnotherMaker})
    ppo_trainer.require_trainer_of_driver()
    monkeypatch.setattr(ppo_trainer.TRAINERS, "entries", {})
    with (
        contextlib.ExitStack() as cleanup,
        pytest.raises(ValueError, match="DriverOfAnotherMaker drives makers of d"),
    ):
        check_ppo_inputs(None, cleanup)


def test_the_script_for_gpus_has_four_for_each_side_and_breaks_no_rule():
    script = Path(__file__).parents[2] / "examples/detached/run_qwen2_5_7b.sh"
    command = script.read_text().split("verl_like.trainer.main_detached ")[-1]
    words = shlex.split(command.replace("\\\n", " ").replace("$@", ""))
    config = load_config(DetachedConfig, broken_detached_rules, list(filter(None, words)))
    assert config.trainer.device == "cuda"
    assert config.resource_pool_spec == {"maker_pool": (4,), "trainer_pool": (4,)}
    assert (
        config.role_mapping["rollout"] == "maker_pool"
        and config.role_mapping["actor"] == "trainer_pool"
    )


def test_a_second_plugin_with_a_trainer_is_refused_by_the_name_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ppo_trainer.TRAINERS, "entries", {})
    assert get_trainer() is RayPPOTrainer
    assert register_trainer(TrainerOfAnotherMaker) is get_trainer() is TrainerOfAnotherMaker
    message = (
        r"TrainerOfOtherPrompts'> cannot train, for .*TrainerOfAnotherMaker'> is registered: "
        r"name one such plugin"
    )
    with pytest.raises(ValueError, match=message):
        register_trainer(TrainerOfOtherPrompts)
    assert get_trainer() is TrainerOfAnotherMaker


def test_a_plugins_driver_of_makers_is_that_of_detached_training_and_a_second_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(maker_driver.DRIVERS, "entries", {})
    assert maker_driver.get_maker_driver() is MakerDriver
    assert maker_driver.register_maker_driver(DriverOfAnotherMaker) is DriverOfAnotherMaker
    message = (
        r"MakerDriver'> cannot drive makers, for .*DriverOfAnotherMaker'> is registered: "
        r"name one such plugin"
    )
    with pytest.raises(ValueError, match=message):
        maker_driver.register_maker_driver(MakerDriver)
    assert maker_driver.get_maker_driver() is DriverOfAnotherMaker


def test_nccl_loads_engines_and_the_object_store_has_what_a_copy_of_the_critic_loads():
    nccl = [
        "actor_rollout_ref.rollout.weight_transport=nccl",
        "trainer.device=cuda",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    config = config_of(*nccl, "algorithm.rollout_correction.bypass_mode=true")
    assert config.plan.maker_roles == ("rollout", "critic")
    mapping = build_role_worker_mapping(config, {})
    assert mapping["critic"].kwargs["weight_transport"] == "object_store"
    assert mapping["actor"].kwargs["config"].rollout.weight_transport == "nccl"
    gloo = build_role_worker_mapping(
        config_of("actor_rollout_ref.rollout.weight_transport=gloo"), {}
    )
    assert gloo["critic"].kwargs["weight_transport"] == "gloo"
    ahead = config_of(*nccl, *IN_FLIGHT[:3], "algorithm.adv_estimator=grpo")
    assert ahead.plan.num_parts_of_step == 1, (
        "in a step no maker gets weights, so a step waits for nothing that one makes"
    )
    assert (
        ahead.updated({"actor_rollout_ref.rollout.weight_transport": "gloo"}).plan.num_parts_of_step
        == 2
    )
