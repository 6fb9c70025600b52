"""Runs of episodes with a real vLLM and a tool have the same tokens and rewards synchronously,
detached and resumed: proofs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import run_apart, run_on_ray

from examples.agents.make_world import Settings, make_world

ROOT = Path(__file__).parents[2]
WORLD = ROOT / ".calculator_world/1"
NUM_STEPS = 3
NUM_EPISODES = 16 * 4
SETTINGS = [
    "device=cpu",
    "trainer.n_gpus_per_node=1",
    f"data.train_files={WORLD}/two_calls/train.parquet",
    f"data.val_files={WORLD}/two_calls/test.parquet",
    f"actor_rollout_ref.model.path={WORLD}/model",
    "data.max_prompt_length=32",
    "data.max_response_length=96",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.dtype=float32",
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.bypass_mode=true",
    "agent.environment=examples.agents.calculator:Calculator",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    f"trainer.log_val_generations={NUM_EPISODES}",
]
"""As many episodes are recorded as a step has."""
DETACHED = ["placement=detached", "trainer.max_staleness=0"]
pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.proof, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    """The model that rarely uses its calculator, and the questions."""
    make_world(WORLD, Settings(seed=1))


def train(folder: Path, num_steps: int, *settings: str) -> None:
    """A run to this step, or one that goes on to it."""
    all_settings = [
        *SETTINGS,
        f"trainer.default_local_dir={folder}/runs",
        f"trainer.total_training_steps={num_steps}",
        *settings,
    ]
    if "placement=detached" in settings:
        assert run_apart(all_settings) == 0
    else:
        run_on_ray(all_settings)


def episodes_of(folder: Path) -> dict[tuple[int, str, int], Any]:
    """What was drawn and inserted in each episode of a run, with the reward."""
    found = {}
    for line in (folder / "runs/latest/episodes.jsonl").read_text().splitlines():
        record = json.loads(line)
        name = record["step"], record["uid"], record["sample"]
        num_drawn = [turn["num_drawn"] for turn in record["turns"]]
        found[name] = (record["rows"], num_drawn, record["reward"])
    assert len(found) == NUM_STEPS * NUM_EPISODES
    return found


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, int], Any]:
    folder = tmp_path_factory.mktemp("synchronous")
    train(folder, NUM_STEPS)
    episodes = episodes_of(folder)
    num_turns = {len(num_drawn) for _rows, num_drawn, _reward in episodes.values()}
    rewards = {reward for _rows, _num_drawn, reward in episodes.values()}
    assert num_turns >= {2, 3, 4} and rewards == {0.0, 1.0}
    return episodes


@pytest.mark.parametrize(
    ("settings", "num_steps_before"),
    [(DETACHED, 0), ([], 1), (DETACHED, 2)],
    ids=["detached", "resumed", "detached and resumed"],
)
def test_the_first_steps_have_the_same_tokens_and_rewards(
    settings: list[str],
    num_steps_before: int,
    synchronous: dict[tuple[int, str, int], Any],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
):
    if num_steps_before:
        train(tmp_path, num_steps_before, *settings)
    train(tmp_path, NUM_STEPS, *settings)
    episodes = episodes_of(tmp_path)
    assert episodes.keys() == synchronous.keys()
    assert [name for name in episodes if episodes[name] != synchronous[name]] == []
