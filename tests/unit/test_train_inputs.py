"""`train` refuses wrong input before Ray starts, and writes models to folders."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from verl_like.train import TrainedRun, train, with_paths, write_inputs
from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.run.errors import InputRefused
from verl_like.trainer.state.resume import changed_inputs, fingerprints_of


def settings(folder: Path, *overrides: str) -> list[str]:
    return [
        "device=cpu",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={folder}/runs",
        f"data.train_files={folder}/rows.jsonl",
        f"data.val_files={folder}/rows.jsonl",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.model.path=policy",
        *overrides,
    ]


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[..., str]:
    """Calls `train`, asserts that it is refused before anything is written; returns the message."""

    def call(*arguments: Any, overrides: tuple[str, ...] = (), **named: Any) -> str:
        config = load_ppo_config(settings(tmp_path, *overrides))
        with pytest.raises(InputRefused) as refused:
            train(*(arguments or [config]), **named)
        assert isinstance(refused.value, ValueError)
        assert not ray.is_initialized()
        assert not (tmp_path / "runs").exists()
        return str(refused.value)

    return call


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    return 1.0


def test_a_configuration_of_another_kind_is_refused(refusal: Callable[..., str], tmp_path: Path):
    assert "train(config=...) is a dict: give what load_ppo_config" in refusal({"data": 1})
    paths = settings(tmp_path, "placement=detached")
    detached = load_config(DetachedConfig, broken_detached_rules, paths)
    assert "train(config=...) is a DetachedConfig" in refusal(detached)


def test_a_function_that_cannot_score_is_refused(refusal: Callable[..., str]):
    def two_arguments(prompt: str, response: str) -> float:
        return 1.0

    message = refusal(reward_fn=two_arguments)
    assert "train(reward_fn=...): two_arguments(prompt: str, response: str) -> float" in message
    assert "it takes data_source, solution_str, ground_truth, extra_info" in message
    assert "train(reward_fn='my_reward.py') is a str: give a function" in refusal(
        reward_fn="my_reward.py"
    )
    message = refusal(reward_fn=score, overrides=("custom_reward_function.path=other.py",))
    assert "custom_reward_function.path=other.py are two reward functions" in message


def test_a_model_without_a_place_a_tokenizer_or_a_configuration_is_refused(
    refusal: Callable[..., str], tiny_llama: Callable
):
    path, model = tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(path)
    message = refusal(models={"polcy": model}, tokenizer=tokenizer)
    assert "no path of a model in the configuration is polcy" in message
    assert "actor_rollout_ref.model.path=policy" in message
    assert "models and their tokenizer go together" in refusal(models={"policy": model})
    assert "models and their tokenizer go together" in refusal(tokenizer=tokenizer)
    linear = nn.Linear(2, 3)
    message = refusal(models={"policy": linear}, tokenizer=tokenizer)
    assert "is a Linear, which has no configuration" in message
    message = refusal(models={"my/policy": model}, tokenizer=tokenizer)
    assert "give one of letters, digits, _ and -" in message
    message = refusal(models={"policy": model}, tokenizer=path)
    assert "train(tokenizer=...) is a str" in message


def test_a_call_in_another_thread_is_refused(tmp_path: Path):
    config = load_ppo_config(settings(tmp_path))
    messages: list[str] = []

    def call() -> None:
        with pytest.raises(InputRefused) as refused:
            train(config)
        messages.append(str(refused.value))

    thread = threading.Thread(target=call, name="of a server")
    thread.start()
    thread.join(timeout=60)
    assert "train() is called in the thread 'of a server'" in messages[0]


def test_a_function_that_fails_is_refused_and_leaves_no_file_and_no_handler_of_signals(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    """The model and the function are written, the function scores the first row, and all of it is
    taken back."""
    path, model = tiny_llama()
    prompt = '[{"role": "user", "content": "1+2"}]'
    row = f'{{"data_source": "sums", "prompt": {prompt}, "reward_model": {{"ground_truth": "3"}}}}'
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{row}\n")
    lengths = ["data.max_prompt_length=8", "data.max_response_length=4"]
    config = load_ppo_config(settings(tmp_path, *lengths))

    def fails(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        raise KeyError(f"no score for {solution_str}")

    fails.__module__ = "__main__"
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(InputRefused, match="KeyError: 'no score for 3'"):
        train(
            config,
            reward_fn=fails,
            models={"policy": model},
            tokenizer=AutoTokenizer.from_pretrained(path),
        )
    assert not ray.is_initialized()
    assert not list((tmp_path / "runs").rglob("*.*"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_model_is_written_once_and_read_wherever_the_configuration_has_its_name(
    tmp_path: Path, tiny_llama: Callable
):
    path, model = tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(path)
    other = LlamaForCausalLM(model.config)
    overrides = [
        "critic.model.path=critic-2",
        "actor_rollout_ref.actor.policy_loss.loss_mode=distillation",
        "actor_rollout_ref.actor.policy_loss.teacher_path=policy",
        "reward_models.safety.path=elsewhere",
        "reward_models.style.path=policy",
        "reward_models.style.weight=0.5",
        "role_mapping.safety=global_pool",
        "role_mapping.style=global_pool",
    ]
    config = load_ppo_config(settings(tmp_path, *overrides))
    models = {"policy": model, "critic-2": other}
    written = write_inputs(config, tmp_path, None, models, tokenizer)
    policy = str(tmp_path / "policy")
    assert written.actor_rollout_ref.model.path == policy
    assert written.actor_rollout_ref.teacher_model.path == policy
    assert written.critic.model.path == str(tmp_path / "critic-2")
    assert written.reward_models["safety"].path == "elsewhere"
    assert written.reward_models["style"].path == policy
    assert written.reward_models["style"].weight == 0.5
    assert config.actor_rollout_ref.model.path == "policy"  # a configuration is a value
    for folder, given in ((policy, model), (tmp_path / "critic-2", other)):
        read = AutoModelForCausalLM.from_pretrained(folder)
        assert all(map(torch.equal, read.parameters(), given.parameters()))
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


def test_the_critic_follows_the_policy_as_in_the_configuration(tmp_path: Path):
    config: PPOConfig = load_ppo_config(settings(tmp_path))
    assert with_paths(config, {"policy": "/a/folder"}).critic.model.path == "/a/folder"


def test_the_same_call_reads_the_same_inputs_so_that_its_run_goes_on_and_another_does_not(
    tmp_path: Path, tiny_llama: Callable
):
    path, model = tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = load_ppo_config(settings(tmp_path))

    def make(bonus: float) -> Callable[..., float]:
        def bonus_alone(data_source: str, solution_str: str, ground_truth: str, extra_info: dict):
            return bonus

        return bonus_alone

    written = []
    for name, bonus in (("first", 0.5), ("again", 0.5), ("another", 0.75)):
        folder = tmp_path / name
        folder.mkdir()
        models = {"policy": model}
        written.append(write_inputs(config, folder, make(bonus), models, tokenizer))
    first, again, another = written
    assert changed_inputs(fingerprints_of(first), again) == []
    assert changed_inputs(fingerprints_of(first), another) == ["custom_reward_function.path"]


def test_a_run_that_only_validated_has_metrics_and_no_model(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val-core/sums/reward/mean@1": 0.25}\n')
    (tmp_path / "generations.jsonl").write_text('{"step": 0, "response": "7"}\n')
    run = TrainedRun.of(tmp_path)
    assert run.metrics[0]["val-core/sums/reward/mean@1"] == 0.25 and run.checkpoint is None
    with pytest.raises(ValueError, match=r"set trainer\.val_only=false to train"):
        _ = run.model
