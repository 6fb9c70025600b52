"""The code of docs/agents.md, a class, a harness and two servers, in runs with its commands."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from agent_environments import environment, free_port, running
from runs import data_row, metrics_of, run_on_ray
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl_like.trainer.run.episodes import EpisodeRecord
from verl_like.workers.agents.openenv_server import describe_openenv
from verl_like.workers.agents.verifiers_server import describe_verifiers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents.md").read_text()
pytestmark = [pytest.mark.ray, pytest.mark.vllm]

SUBMIT = '{"name": "submit", "arguments": {"value": 42}}'
NEXT = {
    "assistant:": ["<tool_call>", "42"],
    "<tool_call>": ['{"name": "multiply", "arguments": {"a": 6, "b": 7}}', SUBMIT],
    '{"name": "multiply", "arguments": {"a": 6, "b": 7}}': ["</tool_call>"],
    SUBMIT: ["</tool_call>"],
    "</tool_call>": ["<eos>"],
    "42": ["<eos>"],
}
"""What the model says behind a token: one of these, which are equally likely."""
TOKENS = ["<unknown>", "<pad>", "<eos>", "user:", "tool:", "6*7=", "taken", *NEXT]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_model(path: Path) -> None:
    """A Llama whose next token depends on the last one alone, and its tokenizer."""
    ids = {token: number for number, token in enumerate(TOKENS)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unknown>"))
    words.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unknown>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=ids["<eos>"],
        pad_token_id=ids["<pad>"],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        (layer,) = model.model.layers
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(TOKENS), 64))
        model.lm_head.weight.zero_()
        for last, followers in NEXT.items():
            for follower in followers:
                model.lm_head.weight[ids[follower], ids[last]] = 3.0  # 24 in the logit
    model.save_pretrained(path)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands_with(setting: str) -> list[str]:
    """The commands of the block of the page that starts a run with this setting."""
    (block,) = [block for block in blocks("bash") if f" {setting}" in block]
    return block.replace("\\\n", " ").splitlines()


class World:
    """A folder with the files of the page, a model and rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_runs = 0
        for block in blocks("python"):
            name = re.match(r"# (\w+\.py)\n", block)
            assert name
            (folder / name[1]).write_text(block)
        (folder / "build").symlink_to(ROOT / "build")
        save_model(folder / "model")
        rows = [data_row(number, "6*7=", "42") for number in range(2)]
        pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")

    def run(self, command: str) -> list[EpisodeRecord]:
        """Does a step with a command of the page, and returns the episodes."""
        _start, _dots, text = command.partition("main_ppo ... ")
        self.num_runs += 1
        folder = self.folder / f"run {self.num_runs}"
        settings = [
            *text.split(),
            "device=cpu",
            "trainer.n_gpus_per_node=1",
            f"data.train_files={self.folder}/data.parquet",
            f"data.val_files={self.folder}/data.parquet",
            f"actor_rollout_ref.model.path={self.folder}/model",
            "data.max_prompt_length=8",
            "data.max_response_length=64",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
            "actor_rollout_ref.rollout.dtype=float32",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.total_training_steps=1",
            "trainer.log_val_generations=16",
            f"trainer.default_local_dir={folder}/runs",
        ]
        run_on_ray(settings)
        (metrics,) = metrics_of(folder)
        assert metrics["agent/num_failed"] == 0 and "agent/num_drifted_calls" not in metrics
        lines = (folder / "runs/latest/episodes.jsonl").read_text().splitlines()
        assert len(lines) == 16
        return [EpisodeRecord.model_validate_json(line) for line in lines]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield World(folder)


def drawn_in(episode: EpisodeRecord) -> str:
    """What the model said in an episode, in each of its turns."""
    (row,) = episode.rows
    return "".join(text for text, is_drawn in row if is_drawn)


def assert_calculated(episodes: list[EpisodeRecord]) -> None:
    """The model used both tools, and each right answer has a reward."""
    results = set()
    rewards = set()
    for episode in episodes:
        calls = [call for turn in episode.turns for call in turn.tool_calls]
        results |= {(call.name, call.result) for call in calls}
        is_right = any(call.name == "submit" for call in calls)
        assert bool(episode.reward) == is_right, episode
        rewards.add(is_right)
    assert results == {("multiply", "42"), ("submit", "taken")}
    assert rewards == {False, True}


def assert_answered(episodes: list[EpisodeRecord]) -> None:
    """The model spoke once, and was rewarded if it said the answer."""
    rewards = set()
    for episode in episodes:
        assert len(episode.turns) == 1
        assert episode.reward == float("42" in drawn_in(episode)), episode
        rewards.add(episode.reward)
    assert rewards == {0.0, 1.0}


@pytest.mark.proof
def test_the_class_of_the_page_gives_tools_to_the_model_and_scores_its_answer(world: World):
    (command,) = commands_with("agent.environment=")
    assert_calculated(world.run(command))


@pytest.mark.proof
def test_the_harness_of_the_page_asks_the_model_and_returns_its_reward(world: World):
    (command,) = commands_with("agent.harness=")
    assert_answered(world.run(command))


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("protocol", "describe", "assert_right"),
    [
        ("verifiers", describe_verifiers, assert_answered),
        ("openenv", describe_openenv, assert_calculated),
    ],
    ids=["verifiers", "openenv"],
)
def test_the_servers_of_the_page_run_its_episodes(
    protocol: str, describe: Callable, assert_right: Callable, world: World
):
    install, serve, run = commands_with(f"agent.server={protocol}://")
    assert install == f"bash scripts/agents_environment.sh {protocol}"
    environment(protocol)
    (old_port,) = re.findall(r"127\.0\.0\.1:(\d+)", run)
    port = free_port()
    for file in world.folder.glob("*.py"):
        file.write_text(file.read_text().replace(f"127.0.0.1:{old_port}", f"127.0.0.1:{port}"))
    command = serve.removesuffix(" &").replace(f"--port {old_port}", f"--port {port}")
    with running(describe, port, ["bash", "-c", command], cwd=world.folder):
        assert_right(world.run(run.replace(f"127.0.0.1:{old_port}", f"127.0.0.1:{port}")))
