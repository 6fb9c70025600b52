"""Generation one step ahead of training (`trainer.max_staleness=1`)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import SPLIT, metrics_of, run_on_ray, tiny_run_settings
from test_local_step import local_trainer, run_locally

from verl_like.protocol import DataProto
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import deep_equal
from verl_like.trainer.ppo.experience_maker import Experience

CORRECTED = ["algorithm.rollout_correction.rollout_is=token", "data.max_response_length=6"]
AHEAD = [*CORRECTED, "trainer.max_staleness=1", "+resource_pool_spec.rollout_pool=[1]"]
AHEAD += ["role_mapping.rollout=rollout_pool"]
TIMES = (
    "timing_s/",
    "perf/",
    "reward/early_ratio",
    "actor/perf/",
    "critic/perf/",
    "training/staleness/",
)


def test_with_weights_that_do_not_change_a_run_that_generates_ahead_has_the_same_numbers(
    tmp_path: Path, tiny_llama: Callable
):
    runs = []
    for name, settings in (("in_turn", CORRECTED), ("ahead", AHEAD)):
        still = ["actor_rollout_ref.actor.optim.lr=0", "trainer.critic_warmup=2"]
        run_locally(tmp_path / name, tiny_llama, *settings, *still, steps=3)
        runs.append(metrics_of(tmp_path / name))
    in_turn, ahead = [
        [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows] for rows in runs
    ]
    assert in_turn == ahead and len(ahead) >= 3 and "critic/vf_loss" in ahead[-1]
    assert [
        row["training/staleness/max"] for row in runs[0] if "training/staleness/max" in row
    ] == [0, 0, 0]
    assert [
        row["training/staleness/mean"] for row in runs[1] if "training/staleness/mean" in row
    ] == [0, 1, 1]


def test_the_next_responses_are_drawn_with_the_weights_that_a_step_starts_from(
    tmp_path: Path, tiny_llama: Callable
):
    with local_trainer(tmp_path, tiny_llama, *AHEAD, steps=3) as trainer:
        drawn_first = []
        for step in (1, 2):  # with the weights before any training
            epoch, rows = trainer.sampler.batch(step - 1)
            prompts = trainer.train_dataset.collate(
                [trainer.train_dataset[row] for row in rows], epoch
            )
            prompts.meta_info["global_steps"] = step
            drawn_first.append(trainer.maker.sample(prompts, None).batch)
        trained: list[DataProto] = []
        learn = trainer.learner.learn

        def learn_and_keep(experience: Experience) -> object:
            trained.append(experience.batch)
            return learn(experience)

        trainer.learner.learn = learn_and_keep
        trainer.fit()
    assert trainer.num_prompt_batches == 3, "no prompts are taken for a step that does not come"
    versions = [
        [spans[0][0] for spans in batch.non_tensor_batch["policy_version"]] for batch in trained
    ]
    assert versions == [[0] * 8, [0] * 8, [1] * 8]
    for batch, expected in zip(trained, drawn_first, strict=False):
        for column in ("responses", "rollout_log_probs"):
            assert deep_equal(batch.batch[column], expected.batch[column])
        assert deep_equal(batch.non_tensor_batch["uid"], expected.non_tensor_batch["uid"])
    # The actor has been trained once when it computes the second step's log-probabilities.
    columns = padded(trained[1]).batch
    assert float((columns["old_log_probs"] - columns["rollout_log_probs"]).abs().max()) > 1e-4


@pytest.mark.ray
@pytest.mark.proof
def test_the_next_responses_are_generated_while_actor_and_critic_train(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *SPLIT,
        *AHEAD,
        "trainer.total_training_steps=3",
    ]
    run_on_ray([*settings, "data.max_response_length=160", "trainer.test_freq=-1"])
    rows = metrics_of(tmp_path)
    assert [row["training/staleness/max"] for row in rows if "training/staleness/max" in row] == [
        0,
        1,
        1,
    ]
    events = [
        json.loads(line)
        for line in (tmp_path / "runs/latest/timeline.jsonl").read_text().splitlines()
    ]
    updates = [each for each in events if each["method"] == "update_actor"]
    generations = [
        each
        for each in events
        if each["method"] == "generate_sequences" and not each["is_validating"]
    ]
    overlapping = [
        (update["step"], generation["step"])
        for update in updates
        for generation in generations
        if generation["started"] < update["finished"] and update["started"] < generation["finished"]
    ]
    assert overlapping, "a generation runs beside an update"
