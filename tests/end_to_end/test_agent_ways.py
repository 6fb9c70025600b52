"""The same messages and tools in episodes of a class, of a harness, and of servers of OpenEnv and
verifiers: real runs whose tokens, masks, versions, rewards and log-probabilities are compared."""

import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_environments import serving
from runs import metrics_of, run_on_ray
from transformers import LlamaForCausalLM

from examples.agents.make_world import Settings, make_world
from verl_like.protocol import DataProto
from verl_like.trainer.ppo import ray_trainer
from verl_like.workers.agents.openenv_server import describe_openenv
from verl_like.workers.agents.verifiers_server import describe_verifiers

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/agent_ways"
WORLD = ROOT / ".calculator_world/often"
"""Its model uses the calculator more often than that of the example."""
NUM_EPISODES = 64 * 4
SETTINGS = [
    "device=cpu",
    "plugins=[keeping_trainer]",
    "trainer.n_gpus_per_node=1",
    f"data.train_files={WORLD}/two_calls/train.parquet",
    f"data.val_files={WORLD}/two_calls/test.parquet",
    f"actor_rollout_ref.model.path={WORLD}/model",
    "data.max_prompt_length=32",
    "data.max_response_length=96",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.routing=fixed",
    "algorithm.adv_estimator=grpo",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.total_training_steps=1",
]
"""With two updates a step the actor computes the log-probabilities of what was drawn."""
WAYS = ("class", "function", "openenv", "verifiers")
TOLERANCE = 2e-5
pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.proof, pytest.mark.timeout(5400)]


@dataclass(frozen=True)
class DrawnEpisode:
    """What one way has made of one sample of a prompt."""

    uid: str
    prompt: list[int]
    tokens: list[tuple[int, bool, int | None]]
    """Behind the prompt: the token, whether it is trained, and the version that has drawn it."""
    log_probs: list[float]
    """Of the tokens, as the engine has drawn them."""
    actor_log_probs: list[float]
    reward: float

    @property
    def num_turns(self) -> int:
        is_drawn = [False, *(is_drawn for _token, is_drawn, _version in self.tokens)]
        return sum(not before and now for before, now in itertools.pairwise(is_drawn))


@contextlib.contextmanager
def way_in(name: str) -> Iterator[list[str]]:
    """The settings of one way to the calculator. Its server, if it has one, runs meanwhile."""
    path = f"{ROOT}:{PROGRAMS}"
    server: AbstractContextManager[Any]
    if name == "class":
        yield ["agent.environment=examples.agents.calculator:Calculator"]
    elif name == "function":
        yield ["agent.harness=calculator_harness:run"]
    elif name == "openenv":
        server = serving(
            describe_openenv, "openenv", "agent_ways/calculator_openenv.py", PYTHONPATH=path
        )
        with server as (address, _process):
            yield [f"agent.server=openenv://{address}", "agent.max_episodes=32"]
    else:
        program = "agent_servers/serve_verifiers.py"
        server = serving(
            describe_verifiers, "verifiers", program, "calculator_taskset", PYTHONPATH=path
        )
        with server as (address, _process):
            yield [f"agent.server=verifiers://{address}", "agent.max_episodes=8"]


def episodes_of(folder: Path) -> list[DrawnEpisode]:
    batch = DataProto.load_from_disk(folder / "runs/made")
    columns = batch.tensors()
    assert columns["sample_id"].tolist() == list(range(NUM_EPISODES)), "a row an episode"
    assert not columns["is_skipped"].any()
    episodes = []
    for row in range(NUM_EPISODES):
        version_of = {}
        for version, start, end in batch.non_tensor_batch["policy_version"][row]:
            version_of |= dict.fromkeys(range(start, end), version)
        tokens = columns["responses"][row].tolist()
        is_drawn = columns["response_mask"][row].bool().tolist()
        versions = [version_of.get(place) for place in range(len(tokens))]
        episode = DrawnEpisode(
            uid=batch.non_tensor_batch["uid"][row],
            prompt=columns["prompts"][row].tolist(),
            tokens=list(zip(tokens, is_drawn, versions, strict=True)),
            log_probs=columns["rollout_log_probs"][row].tolist(),
            actor_log_probs=columns["old_log_probs"][row].tolist(),
            reward=columns["token_level_scores"][row].sum().item(),
        )
        episodes.append(episode)
    return episodes


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[DrawnEpisode]]]:
    """Those of each way, in the order of the prompts and samples."""
    make_world(WORLD, Settings(seed=1, two_calls_rate=0.6))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROGRAMS)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        patch.setattr(ray_trainer.TRAINERS, "entries", dict(ray_trainer.TRAINERS.entries))
        drawn = {}
        for name in WAYS:
            folder = tmp_path_factory.mktemp(name)
            with way_in(name) as settings:
                run_on_ray([*SETTINGS, f"trainer.default_local_dir={folder}/runs", *settings])
            [metrics] = metrics_of(folder)
            assert metrics["agent/num_failed"] == 0
            drawn[name] = episodes_of(folder)
        yield drawn


def first_difference(one: DrawnEpisode, other: DrawnEpisode) -> int | None:
    """The place of the first token that differs, is trained in one alone, or was drawn by another
    version."""
    pairs = itertools.zip_longest(one.tokens, other.tokens)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)


def is_flip(one: DrawnEpisode, other: DrawnEpisode, place: int) -> bool:
    """Whether both have drawn another token at this place."""
    if place >= min(len(one.tokens), len(other.tokens)):
        return False
    _token, is_drawn, version = one.tokens[place]
    _other_token, is_other_drawn, other_version = other.tokens[place]
    return is_drawn and is_other_drawn and version == other_version


def log_probs_of_transformers(model: LlamaForCausalLM, episode: DrawnEpisode) -> list[float]:
    tokens = [token for token, _is_drawn, _version in episode.tokens]
    ids = torch.tensor([episode.prompt + tokens])
    with torch.inference_mode():
        log_probs = model(ids).logits[0, len(episode.prompt) - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def largest_gap(one: list[float], other: list[float], episode: DrawnEpisode, end: int) -> float:
    """Between the log-probabilities of the drawn tokens before `end`."""
    gaps = [0.0]
    for place in range(end):
        if episode.tokens[place][1]:
            gaps.append(abs(one[place] - other[place]))
    return max(gaps)


def test_a_class_a_function_and_servers_of_openenv_and_verifiers_give_the_same_episodes(
    episodes: dict[str, list[DrawnEpisode]], record_property: Callable[[str, object], None]
):
    flipped = {}
    told_otherwise = {}
    gap_of_ways = 0.0
    for (name, own), (other_name, others) in itertools.combinations(episodes.items(), 2):
        for number, (one, other) in enumerate(zip(own, others, strict=True)):
            assert (one.uid, one.prompt) == (other.uid, other.prompt)
            place = first_difference(one, other)
            if place is None:
                assert one.reward == other.reward, (name, other_name, number)
                place = len(one.tokens)
            elif is_flip(one, other, place):
                flipped[number] = (name, other_name, place)
            else:
                told_otherwise[number] = (name, other_name, place)
            gap = largest_gap(one.log_probs, other.log_probs, one, place)
            gap_of_ways = max(gap_of_ways, gap)
    model = LlamaForCausalLM.from_pretrained(WORLD / "model", dtype=torch.float32)
    gap_of_transformers = 0.0
    gap_of_actor = 0.0
    for own in episodes.values():
        for episode in own:
            end = len(episode.tokens)
            expected = log_probs_of_transformers(model, episode)
            gap = largest_gap(episode.log_probs, expected, episode, end)
            gap_of_transformers = max(gap_of_transformers, gap)
            gap = largest_gap(episode.log_probs, episode.actor_log_probs, episode, end)
            gap_of_actor = max(gap_of_actor, gap)
    num_turns = Counter(episode.num_turns for episode in episodes["class"])
    rewards = Counter(episode.reward for episode in episodes["class"])
    record_property(
        "result",
        f"{NUM_EPISODES} episodes a way, of 1 to 4 turns {sorted(num_turns.items())}, rewards "
        f"{sorted(rewards.items())}; flips {flipped}, other texts of tools {told_otherwise}; "
        f"log-probabilities of the ways differ by at most {gap_of_ways:.1e}, from those of "
        f"transformers by {gap_of_transformers:.1e}, of the actor by {gap_of_actor:.1e}",
    )
    assert min(num_turns[2], num_turns[3], num_turns[4]) >= 25
    assert rewards.keys() == {0.0, 1.0} and rewards[1.0] >= 50
    assert len(flipped) <= NUM_EPISODES // 256
    assert not told_otherwise
    assert max(gap_of_ways, gap_of_transformers, gap_of_actor) < TOLERANCE
