"""No file that a run writes has a secret, and a run that goes on takes them from its command."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import tiny_run_settings
from test_which_run_is_resumed import run_until

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state.resume import find_run

OF_KEY, OF_VARIABLE, OF_URL = "canary-of-a-key", "canary-of-a-variable", "canary-of-a-url"
KWARGS = "custom_reward_function.reward_kwargs"
TELLING_REWARD = """
import os, pathlib

def compute_score(data_source, solution_str, ground_truth, extra_info, api_key, region, url):
    secrets = f"{api_key} {region} {url} {os.environ['JUDGE_TOKEN']}"
    assert secrets == "canary-of-a-key canary-of-a-variable http://me:canary-of-a-url@host/ canary-of-a-variable"
    if list(pathlib.Path(__file__).parent.glob("runs/*/global_step_1/manifest.json")):
        raise ValueError(secrets)
    return {"score": len(set(solution_str)) / 4, "said": secrets}
"""


def files_with(folder: Path, text: str) -> list[Path]:
    return [
        path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()
    ]


@pytest.mark.proof
@pytest.mark.ray
def test_no_file_and_no_line_of_a_run_has_a_secret(tmp_path: Path, tiny_llama: Callable):
    """One that keeps a checkpoint and then fails with an error that has them all."""
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        "trainer.total_training_steps=6",
        "trainer.save_freq=1",
        "trainer.logger=[tensorboard]",
        "algorithm.adv_estimator=grpo",
        f"{KWARGS}.api_key={OF_KEY}",
        f"{KWARGS}.region=${{oc.env:JUDGE_TOKEN}}",
        f"{KWARGS}.url='http://me:{OF_URL}@host/'",
    ]
    (tmp_path / "reward.py").write_text(TELLING_REWARD)
    with tempfile.TemporaryDirectory(prefix="ray_") as session:  # a path of Ray's sockets is short
        env = os.environ | {"JUDGE_TOKEN": OF_VARIABLE, "RAY_TMPDIR": session}
        command = [sys.executable, "-m", "verl_like.trainer.main_ppo", *settings]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
        output = done.stdout + done.stderr
        assert done.returncode == 1 and "ValueError: *** *** http://***@host/ ***" in output, (
            output[-3000:]
        )
        leaks = [secret for secret in (OF_KEY, OF_VARIABLE, OF_URL) if secret in output]
        leaks += [
            path
            for secret in (OF_KEY, OF_VARIABLE, OF_URL)
            for path in files_with(tmp_path / "runs", secret)
        ]
        assert list(Path(session).rglob("session_*/logs/*.out"))
        leaks += [
            path
            for secret in (OF_KEY, OF_VARIABLE, OF_URL)
            for path in files_with(Path(session), secret)
        ]
    assert not leaks
    (run_dir,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert (run_dir / "global_step_1/manifest.json").exists() and list(
        run_dir.glob("tensorboard/*")
    )
    for name in ("config.yaml", "report.html"):
        text = (run_dir / name).read_text()
        assert "***" in text and "http://***@host/" in text, name
    assert "ValueError: *** *** http://***@host/ ***" in (run_dir / "report.html").read_text()


def test_a_run_that_goes_on_takes_secrets_from_its_command(tmp_path: Path, tiny_llama: Callable):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), "trainer.total_training_steps=4"]

    def config_with(key: str, password: str, scale: float = 0.5):
        own = [
            f"{KWARGS}.api_key={key}",
            f"{KWARGS}.url='http://me:{password}@host/'",
            f"{KWARGS}.scale={scale}",
        ]
        return load_ppo_config([*settings, *own])

    folder = run_until(2, config_with("canary1", "canary2"))
    again = config_with("canary3", "canary4")
    run, _ = find_run(again)
    assert run and run.run_dir == folder
    recorder = RunRecorder(again, PPO_DISPLAY, run)
    assert recorder.config.custom_reward_function.reward_kwargs["api_key"] == "canary3"
    recorder.close("Done.")
    assert not [path for number in (1, 2, 3, 4) for path in files_with(folder, f"canary{number}")]
    run, (note,) = find_run(config_with("canary3", "canary4", scale=0.25))
    assert (
        run is None and "'scale': 0.5" in note and "'scale': 0.25" in note and "canary" not in note
    )
