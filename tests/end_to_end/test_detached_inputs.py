"""The sides of a detached run read what the run began with, also when a maker is started again, or
end the run."""

import contextlib
import inspect
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import AHEAD, GRPO, kill_once, metrics_of, num_steps_logged, run_apart, tiny_run_settings

from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.detached_trainer import DetachedPPOTrainer
from verl_like.trainer.detached.ledger import PromptLedger
from verl_like.trainer.detached.maker_holder import ExperienceMakerHolder
from verl_like.trainer.detached.run_detached import check_detached_inputs
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.ppo import maker_driver
from verl_like.trainer.ppo.local_trainer import LocalTrainer
from verl_like.trainer.ppo.maker_driver import OF_PLUGIN, MakerDriver
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.resume import fingerprints_of


def side_of(actor_class: Any, config: DetachedConfig, **fields: Any) -> Any:
    """A maker or a trainer in this process, without the actor that it is."""
    side = object.__new__(actor_class.__ray_metadata__.modified_class)
    own = {
        "name": "a_side",
        "model_fn": None,
        "pools": None,
        "recorder": SideRecorder("a_side", node=""),
    }
    vars(side).update(own | {"config": config, "fingerprints": fingerprints_of(config)} | fields)
    return side


def config_with_texts(folder: Path, tiny_llama: Callable) -> DetachedConfig:
    """Of a run that trains on texts beside the prompts; both are read by its sides."""
    texts = folder / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"{n}+1={n + 1}"}) for n in range(8)))
    settings = [*tiny_run_settings(folder, tiny_llama), *GRPO, f"data.ptx_files={texts}"]
    settings += ["actor_rollout_ref.actor.ptx_coef=0.5", "reward.num_workers=1"]
    return load_config(DetachedConfig, broken_detached_rules, settings)


def test_checked_inputs_have_the_runs_own_pools_the_number_of_steps_and_no_reward_process(
    tmp_path: Path, tiny_llama: Callable
):
    config = config_with_texts(tmp_path, tiny_llama)
    config = config.updated({"trainer.total_training_steps": None, "trainer.total_epochs": 3})
    with contextlib.ExitStack() as cleanup:
        inputs = check_detached_inputs(config, cleanup)
    # 8 prompts, 4 of them in a step, 3 times
    chosen = {
        "trainer.total_training_steps": 6,
        "actor_rollout_ref.actor.router_replay.mode": "disabled",  # a model without experts
    }
    assert inputs.config == config.updated(chosen)
    # The reward processes of the check have ended. Each maker starts its own.
    assert inputs.scorer is None


def test_a_maker_that_reads_another_file_than_the_run_began_with_is_refused(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    driver = type("LocalDriver", (MakerDriver,), {"start_groups": LocalTrainer.start_groups})
    monkeypatch.setattr(maker_driver.DRIVERS, "entries", {OF_PLUGIN: driver})
    config = config_with_texts(tmp_path, tiny_llama)
    ledger = PromptLedger(
        2, batch_size=4, detached=config.detached, max_staleness=config.trainer.max_staleness
    )
    with contextlib.ExitStack() as cleanup:
        maker = side_of(
            ExperienceMakerHolder, config.of_maker("maker_0"), cleanup=cleanup, ledger=ledger
        )
        assert len(maker.start().dataset) == 8
        (tmp_path / "reward.py").write_text(
            (tmp_path / "reward.py").read_text().replace("/ 4", "/ 5")
        )
        message = (
            r"^a_side read other files than the run began with: "
            r"custom_reward_function\.path\. .* Restore them"
        )
        with pytest.raises(ValueError, match=message):
            maker.start()
        maker.fingerprints = None  # connected by hand, without a run
        maker.start()


def test_a_trainer_that_reads_another_file_than_the_run_began_with_is_refused(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    def start_here(config: DetachedConfig, mapping: dict, *_: Any) -> tuple[dict, list]:
        return {role: LocalWorkerGroup(built, role=role) for role, built in mapping.items()}, []

    config = config_with_texts(tmp_path, tiny_llama)
    config = config.updated({"trainer.total_training_steps": 2, "trainer.max_staleness": 3})
    place = {
        "index": 0,
        "env_info": {"world_size": 1},
        "pools": "none, since its groups start here",
    }
    trainer = side_of(DetachedPPOTrainer, config.of_trainer("trainer_0"), **place)
    # Ray may have made the class again, whose functions then have a module's names of their own.
    names = inspect.unwrap(type(trainer).start).__globals__
    monkeypatch.setitem(names, "start_groups", start_here)
    trainer.start()
    learner = trainer.learner
    assert (learner.config.trainer.max_staleness, len(learner.ptx_dataset), learner.joint) == (
        3,
        8,
        (0, 1),
    )
    with open(tmp_path / "texts.jsonl", "a") as file:
        file.write('\n{"text": "more"}')
    with pytest.raises(
        ValueError, match=r"^a_side read other files than the run began with: data\.ptx_files\. "
    ):
        trainer.start()


@pytest.mark.ray
@pytest.mark.proof
def test_a_run_whose_data_changes_ends_when_a_maker_is_started_again_and_goes_on_with_the_old_data(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *GRPO, *AHEAD, "trainer.save_freq=2"]
    settings += ["trainer.total_training_steps=80"]
    data = tmp_path / "data.parquet"
    whole = data.read_bytes()

    def is_time() -> bool:
        if num_steps_logged(tmp_path) < 4:
            return False
        pq.write_table(pa.Table.from_pylist(pq.read_table(data).to_pylist()[::-1]), data)
        return True

    kill_once("ExperienceMakerHolder", signal.SIGKILL, when=is_time)
    assert run_apart(settings) == 1
    message = capsys.readouterr().err
    assert (
        "maker_0 read other files than the run began with: data.train_files, data.val_files. "
        in message
    )
    assert checkpoint.steps(tmp_path / "runs/latest")
    data.write_bytes(whole)
    assert run_apart(settings) == 0
    steps = [row["step"] for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert steps == list(range(1, 81))
