"""The maker and the learner, each alone: between them only experience and weights travel."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_requests import generate_sequences
from test_local_step import local_trainer

from examples.local_grpo_step import LocalTrainer
from verl_like.protocol import DataProto, Metric, merge_metrics, metric_values
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import deep_equal
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.trainer.loop.balancing import RowWork
from verl_like.trainer.ppo.experience_maker import Experience, Generated, Scored, Weights
from verl_like.trainer.ppo.inputs import load_ptx_dataset
from verl_like.trainer.ppo.learner import Learner, Update

SETTINGS = ["algorithm.use_kl_in_reward=true", "data.max_response_length=6", "trainer.seed=5"]
SETTINGS += ["actor_rollout_ref.actor.optim.lr_warmup_steps=3", "critic.optim.lr_warmup_steps=4"]
SETTINGS += ["trainer.balance_batch=false"]
SHARES = ("training/staleness/share_", "training/staleness/mixed")
"""How metrics begin that are there if `trainer.max_staleness` is above 0."""


def prompts_of(trainer: LocalTrainer, step: int) -> DataProto:
    """The prompts of a step, counted from 1."""
    epoch, rows = trainer.sampler.batch(step - 1)
    prompts = trainer.train_dataset.collate([trainer.train_dataset[i] for i in rows], epoch)
    prompts.meta_info["global_steps"] = step
    return prompts


def learner_alone(trainer: LocalTrainer, critic_warmup: int = 0) -> Learner:
    """A learner with new models, as those of the trainer were when it was made."""
    groups = {
        role: LocalWorkerGroup(trainer.role_worker_mapping[role], role=role)
        for role in ("actor", "critic")
    }
    for group in groups.values():
        group.init_model()
    config = trainer.config.updated({"trainer.critic_warmup": critic_warmup})
    return Learner(config.updated({"trainer.max_staleness": 1}), groups)


def experience_of(trainer: LocalTrainer, batch: DataProto) -> Experience:
    return Experience(batch, RowWork.of(batch, trainer.maker.model_cost, balance=True), {})


def fingerprint(weights: Weights) -> dict[str, int]:
    (export,) = weights.exported.get()
    assert export.version == weights.version
    return export.fingerprints


def measured(metrics: dict[str, Metric], prefixes: tuple[str, ...] = ("",)) -> dict[str, Any]:
    """The metrics that do not depend on time and memory."""
    untimed = {
        name: metric
        for name, metric in metrics.items()
        if "perf/" not in name and name != "reward/early_ratio"
    }
    return {name: metric.value for name, metric in untimed.items() if name.startswith(prefixes)}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable) -> Any:
    with local_trainer(tmp_path_factory.mktemp("run"), tiny_llama, *SETTINGS) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def experience(trainer: LocalTrainer) -> Experience:
    """Of the first step's prompts, with the weights that training starts from."""
    return trainer.maker.make(prompts_of(trainer, 1))


def test_a_maker_makes_the_same_experience_of_the_same_prompts_and_weights(
    trainer: LocalTrainer, experience: Experience
):
    """A validation in between changes nothing."""
    val_prompts = prompts_of(trainer, 2)
    val_prompts.meta_info["validate"] = True
    batch, scores_B, _ = trainer.maker.generate_and_score(val_prompts, num_samples=1)
    assert len(batch) == len(scores_B) == 4
    again = trainer.maker.make(prompts_of(trainer, 1))
    assert deep_equal(dict(again.batch.batch.items()), dict(experience.batch.batch.items()))
    assert deep_equal(again.batch.non_tensor_batch, experience.batch.non_tensor_batch)
    assert measured(again.metrics) == measured(experience.metrics)
    assert deep_equal(again.work, experience.work)
    other = trainer.maker.make(prompts_of(trainer, 2))
    assert not deep_equal(other.batch.batch["responses"], experience.batch.batch["responses"])


def test_the_rows_of_experience_are_balanced_if_the_configuration_says_so(experience: Experience):
    assert experience.work.balance is False  # the default is true


def test_each_response_says_which_weights_sampled_its_tokens(
    trainer: LocalTrainer, experience: Experience
):
    lengths = padded(experience.batch).batch["response_mask"].sum(-1).tolist()
    assert experience.batch.non_tensor_batch["policy_version"].tolist() == [
        ((0, 0, n),) for n in lengths
    ]


def test_a_learner_that_never_saw_the_maker_learns_from_a_file_what_the_trainers_step_learns(
    tmp_path: Path, tiny_llama: Callable
):
    made: list[Experience] = []
    with local_trainer(tmp_path / "run", tiny_llama, *SETTINGS) as trainer:
        complete = trainer.maker.complete

        def complete_and_keep(generated: Generated) -> Experience:
            made.append(complete(generated))
            return made[-1]

        trainer.maker.complete = complete_and_keep
        learner = learner_alone(trainer)
        for step in (1, 2):
            trainer.global_step = step
            in_step = metric_values(trainer.step())
            made[-1].batch.save_to_disk(tmp_path / "experience")
            update = learner.learn(
                experience_of(trainer, DataProto.load_from_disk(tmp_path / "experience"))
            )
            alone = measured(update.get())
            assert not any(name.startswith(SHARES) for name in in_step)
            # The learner alone allows another staleness, whose shares it counts.
            alone = {name: value for name, value in alone.items() if not name.startswith(SHARES)}
            assert alone and alone == {name: in_step[name] for name in alone}
            assert {
                "actor/pg_loss",
                "actor/grad_norm",
                "critic/vf_loss",
                "critic/grad_norm",
            } <= alone.keys()
        assert learner.version == trainer.learner.version == 2
        assert fingerprint(learner.export_weights()) == fingerprint(
            trainer.learner.export_weights()
        )
        # The experience of the second step is of the weights after the first.
        versions = [
            [spans[0][0] for spans in each.batch.non_tensor_batch["policy_version"]]
            for each in made
        ]
        assert versions == [[0] * 8, [1] * 8]


def learn_in_parts(
    learner: Learner, trainer: LocalTrainer, experience: Experience
) -> dict[str, Metric]:
    """One training step on the two mini-batches of the experience, one after the other."""
    version, updates = learner.version, []
    for part in (1, 2):
        batch = experience.batch[slice(4 * part - 4, 4 * part)]
        batch.meta_info["part_of_step"] = (part, 2)
        updates.append(learner.learn(experience_of(trainer, batch)))
        assert learner.version == version + (part == 2)
    pending = [future for update in updates for future in update.pending]
    return Update(pending, merge_metrics([update.metrics for update in updates])).get()


def test_a_step_in_parts_trains_and_measures_as_the_whole_does(
    trainer: LocalTrainer, experience: Experience
):
    """With learning rates that rise, a critic, and in the first step advantages that overflow in
    both parts."""
    whole, parts = learner_alone(trainer), learner_alone(trainer)
    start = fingerprint(whole.export_weights())
    overflowing = experience.batch.select()
    overflowing.batch["advantages"] = torch.full_like(overflowing.batch["advantages"], torch.inf)
    for step, its_experience in enumerate(
        (Experience(overflowing, experience.work, {}), experience)
    ):
        expected = measured(whole.learn(its_experience).get())
        metrics = measured(learn_in_parts(parts, trainer, its_experience))
        assert (
            metrics.keys()
            == expected.keys()
            > {"actor/eff_sample_size", "critic/vf_loss", "critic/grad_norm"}
        )
        for name in [name for name in expected if not name.startswith("global_seqlen/")]:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
        assert (expected["actor/skipped_steps"], expected["training/staleness/max"]) == [
            (2, 0),
            (0, 1),
        ][step]
        assert expected["actor/lr"] == pytest.approx(1e-3 * (step + 1) / 3)
        assert expected["critic/lr"] == pytest.approx(1e-3 * (step + 1) / 4)
    for role in ("actor", "critic"):
        (of_whole,), (of_parts,) = (learner.groups[role].workers for learner in (whole, parts))
        assert of_parts.engine.training_steps == of_whole.engine.training_steps == 2
        for (name, value), (_, expected) in zip(
            of_parts.engine.named_parameters(), of_whole.engine.named_parameters(), strict=True
        ):
            assert torch.equal(value.full_tensor(), expected.full_tensor()), name
    weights = parts.export_weights()
    assert (
        weights.version == 2
        and fingerprint(weights) == fingerprint(whole.export_weights()) != start
    )


def test_each_call_of_the_learner_is_a_training_step_unless_it_is_told_otherwise(
    trainer: LocalTrainer, experience: Experience
):
    parts = learner_alone(trainer)
    updates = [
        parts.learn(experience_of(trainer, experience.batch[rows]))
        for rows in (slice(0, 4), slice(4, 8))
    ]
    assert all(update.get()["actor/grad_norm"].value > 0 for update in updates)
    assert (parts.version, parts.export_weights().version) == (2, 2)
    assert [update.get()["training/staleness/max"].value for update in updates] == [0, 1]
    shares = [
        [update.get()[f"training/staleness/share_{steps}"].value for steps in (0, 1)]
        for update in updates
    ]
    assert shares == [[1, 0], [0, 1]]
    with pytest.raises(AssertionError):
        parts.learn(experience)  # 2 versions old
    with pytest.raises(ValueError, match="no column policy_version"):
        parts.learn(experience_of(trainer, experience.batch.select(non_tensor_batch_keys=["uid"])))
    assert parts.version == 2
    mixed = experience.batch[slice(0, 4)]
    mixed.non_tensor_batch["policy_version"][:] = [((1, 0, 2), (2, 2, 5)), *[((2, 0, 5),)] * 3]
    assert parts.staleness(mixed)["training/staleness/mean"].value == 0.25, (
        "the oldest token counts"
    )


def test_the_critics_warm_up_leaves_the_actor_as_it_is_but_numbers_its_weights(
    trainer: LocalTrainer, experience: Experience
):
    learner = learner_alone(trainer, critic_warmup=1)
    start = fingerprint(learner.export_weights())
    first = learner.learn(experience).get()
    weights = learner.export_weights()
    assert (weights.version, fingerprint(weights)) == (1, start)
    second = learner.learn(experience).get()
    assert fingerprint(learner.export_weights()) != start
    assert (
        "critic/lr" in first
        and "actor/lr" not in first
        and {"critic/lr", "actor/lr"} <= second.keys()
    )


def test_log_probs_of_fixed_prompts_and_the_fingerprint_move_if_and_only_if_the_learner_says_so(
    tmp_path: Path, tiny_llama: Callable
):
    settings = ["trainer.critic_warmup=1", "data.max_response_length=6"]
    with local_trainer(tmp_path, tiny_llama, *settings, steps=4) as trainer:
        (worker,), fixed = trainer.groups["rollout"].workers, prompts_of(trainer, 5)

        def seen() -> tuple[torch.Tensor, dict[str, int]]:
            output = generate_sequences(worker.rollout, fixed)
            return output.batch["rollout_log_probs"], worker.rollout._fingerprints()

        estimate, says, moved = trainer.maker.estimate, [], []

        def estimate_that_overflows_in_step_3(corrected: Scored) -> Scored:
            estimated = estimate(corrected)
            factor = torch.inf if trainer.global_step == 3 else 1.0
            return estimated.with_columns(
                {"advantages": estimated.batch.batch["advantages"] * factor}
            )

        trainer.maker.estimate = estimate_that_overflows_in_step_3
        log_probs, loaded = seen()
        for step in (1, 2, 3, 4):
            trainer.global_step = step
            metrics = metric_values(trainer.step())
            # Also where the weights are those of before
            assert worker.rollout.policy_version == step
            # Of two optimizer steps
            says.append("actor/lr" in metrics and metrics["actor/skipped_steps"] < 2)
            before, (log_probs, loaded) = (log_probs, loaded), seen()
            assert loaded == fingerprint(trainer.learner.export_weights())
            moved.append((not deep_equal(log_probs, before[0]), loaded != before[1]))
    assert says == [False, True, False, True]
    assert moved == [(each, each) for each in says]


def test_the_ptx_rows_are_a_function_of_the_step_which_its_parts_and_joint_trainers_divide(
    trainer: LocalTrainer, experience: Experience, tmp_path: Path
):
    (tmp_path / "ptx.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{n:02}+1={n + 1}"}) for n in range(18))
    )
    settings = {
        "data.ptx_files": (str(tmp_path / "ptx.jsonl"),),
        "data.ptx_batch_size": 4,
        "trainer.critic_warmup": 2,
    }
    config = trainer.config.updated(settings)
    dataset = load_ptx_dataset(config, trainer.tokenizer)

    def rows_of(
        version: int, part: tuple[int, int] = (1, 1), joint: tuple[int, int] = (0, 1)
    ) -> list[list[int]]:
        of_trainer = config.updated({"data.ptx_batch_size": 4 // joint[1]})
        learner = Learner(of_trainer, trainer.groups, dataset, joint, version)
        mini_batches = 2 // part[1]  # of 4 responses each
        batch = experience.batch[slice(0, 4 * mini_batches)]
        batch.meta_info["part_of_step"] = part
        (rows,) = learner.ptx_rows(batch, experience_of(trainer, batch).work)
        prompts, responses = (rows.batch.batch[name].unbind() for name in ("prompts", "responses"))
        return [torch.cat(row).tolist() for row in zip(prompts, responses, strict=True)]

    steps = [rows_of(version) for version in (2, 3, 4)]
    assert [len(rows) for rows in steps] == [8, 8, 8]
    assert rows_of(3) == steps[1], "whatever came before"
    assert len({tuple(row) for rows in steps[:2] for row in rows}) == 16, (
        "of the first epoch, which leaves 2 out"
    )
    assert rows_of(4, (1, 2)) + rows_of(4, (2, 2)) == steps[2]
    halves = [rows_of(3, joint=(index, 2)) for index in (0, 1)]
    for mini_batch in (0, 1):
        joined = [row for half in halves for row in half[2 * mini_batch : 2 * mini_batch + 2]]
        assert joined == steps[1][4 * mini_batch : 4 * mini_batch + 4]


def test_the_last_mini_batch_may_have_fewer_rows(trainer: LocalTrainer, experience: Experience):
    metrics = (
        learner_alone(trainer).learn(experience_of(trainer, experience.batch[slice(0, 6)])).get()
    )
    assert metrics["actor/grad_norm"].weight == 2  # a step of four rows, and one of two
