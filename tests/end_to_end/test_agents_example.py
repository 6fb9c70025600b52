"""The example of agents: its world and its calculator, and as a proof its runs."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optional_packages import needs_vllm

from examples.agents.accuracy import accuracies
from examples.agents.calculator import Calculator
from examples.agents.make_world import (
    END,
    Settings,
    WarmUpExamples,
    conversation,
    make_model,
    make_problems,
    make_tokenizer,
    make_world,
    warm_up,
)
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.workers.agents.chat import ChatFormat

pytestmark = needs_vllm

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(seed=5, num_problems=40, num_held_out=7, two_calls_rate=0.5)


def examples_of(settings: Settings) -> WarmUpExamples:
    problems = {task: make_problems(task, settings) for task in ("product", "two_calls")}
    return WarmUpExamples(problems, make_tokenizer(), settings)


def test_only_the_right_answer_has_a_reward():
    calculator = Calculator()
    rewards = []
    for answer in (408, 407):
        calculator.reset(reward_model={"ground_truth": "408"}, prompt=[])
        rewards.append(calculator.get_reward())
        assert calculator.multiply(12, "34") == 408
        calculator.submit(answer)
        rewards.append(calculator.get_reward())
    assert rewards == [0.0, 1.0, 0.0, 0.0]


def test_the_problems_are_different_ones_and_depend_on_the_seed():
    for task, num_factors in (("product", 2), ("two_calls", 3)):
        problems = make_problems(task, SETTINGS)
        assert len(set(problems)) == len(problems) == 47
        assert {len(problem) for problem in problems} == {num_factors}
        assert problems != make_problems(task, replace(SETTINGS, seed=6))


def test_the_model_learns_its_turns_and_in_half_of_the_conversations_no_choice():
    examples = examples_of(SETTINGS)
    tokenizer = examples.tokenizer
    multiply = tokenizer.convert_tokens_to_ids("multiply")
    num_kept = num_left_out = 0
    for _ in range(60):
        tokens, are_learnt = examples.draw()
        text = tokenizer.decode(tokens)
        turns = text.split("<|im_start|>assistant\n")[1:]
        turns = [turn[: turn.index(END) + len(END)] for turn in turns]
        learnt = [token for token, is_learnt in zip(tokens, are_learnt, strict=True) if is_learnt]
        if tokenizer.decode(learnt) == "".join(turns):
            num_kept += 1
        else:
            num_left_out += 1
            assert tokenizer.decode(learnt) == "".join(turns).replace("multiply", "")
            num_needed = text.count("*")
            assert tokens.count(multiply) == 1 + num_needed  # the system's turn has the name too
    assert min(num_kept, num_left_out) > 15


def test_vllm_reads_the_calls_of_the_template_and_a_result_stands_behind_a_turn():
    examples = examples_of(SETTINGS)
    tokenizer = examples.tokenizer
    chat = ChatFormat(
        *(tokenizer, {}, [tokenizer.eos_token_id]),
        tool_parser="hermes",
        reasoning_parser=None,
        keep_reasoning=False,
    )
    messages = conversation((12, 34, 5), 2)
    assert [message["content"] for message in messages if message["role"] == "tool"] == [
        *("408", "2040", "taken")
    ]
    drawn = chat.tokens(
        '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call><|im_end|>'
    )
    (call,) = chat.read(drawn, examples.tools)["tool_calls"]
    assert call["function"] == messages[1]["tool_calls"][0]["function"]
    before = chat.render(messages[:2], examples.tools, is_prompt=False)
    prompt = chat.render(messages[:3], examples.tools, is_prompt=True)
    tail = chat.tail(prompt, before, drawn)
    assert tail is not None
    whole = chat.tokens(chat.render(messages[:1], examples.tools, is_prompt=True)) + drawn + tail
    assert whole == chat.tokens(prompt)


def test_the_warm_up_learns_what_is_learnt_alone():
    settings = replace(SETTINGS, num_steps=40, batch_size=8)
    examples = examples_of(settings)
    model = make_model(settings, examples.tokenizer)

    def loss(are_scored: Callable[[bool], bool]) -> float:
        tokens, are_learnt = examples_of(settings).draw()
        labels = [
            token if are_scored(is_learnt) else -100
            for token, is_learnt in zip(tokens, are_learnt, strict=True)
        ]
        with torch.no_grad():
            return model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss

    before = loss(lambda is_learnt: is_learnt), loss(lambda is_learnt: not is_learnt)
    warm_up(model, examples, settings)
    after = loss(lambda is_learnt: is_learnt), loss(lambda is_learnt: not is_learnt)
    assert after[0] < 0.6 * before[0]
    assert after[1] > 0.9 * before[1]


def test_a_world_that_is_there_stays_and_one_of_other_settings_is_made_again(tmp_path: Path):
    settings = replace(SETTINGS, num_steps=2, batch_size=2)
    make_world(tmp_path, settings)
    weights = tmp_path / "model" / "model.safetensors"
    first = weights.stat().st_mtime_ns
    make_world(tmp_path, settings)
    assert weights.stat().st_mtime_ns == first
    make_world(tmp_path, replace(settings, seed=6))
    assert weights.stat().st_mtime_ns > first


def test_the_configurations_have_256_episodes_a_step_and_sampled_validation():
    own = ["data.train_files=rows", "data.val_files=rows", "actor_rollout_ref.model.path=model"]
    folder = str(ROOT / "examples/agents/config")
    ppo = load_ppo_config(own, "ppo", folder)
    detached = load_config(DetachedConfig, broken_detached_rules, own, "detached", folder)
    for config in (ppo, detached):
        rollout = config.actor_rollout_ref.rollout
        assert config.data.train_batch_size * rollout.n == 256
        assert config.trainer.total_training_steps == 20
        assert rollout.val_kwargs.temperature == rollout.temperature == 1
        assert config.agent.environment == "examples.agents.calculator:Calculator"


@pytest.mark.proof
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("task", ["product", "two_calls"])
def test_a_model_that_rarely_uses_a_calculator_learns_to_use_it(
    task: str, seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
):
    command = ["bash", "examples/agents/run.sh", "ppo", task, str(seed)]
    subprocess.run(
        [*command, f"trainer.default_local_dir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=2300,
    )
    by_step = accuracies(tmp_path / "latest")
    shown = ", ".join(f"{step}: {accuracy:.3f}" for step, accuracy in by_step.items())
    record_property("result", f"accuracy by step: {shown}")
    assert by_step[0] <= 0.1
    assert by_step[20] >= 0.9
