"""Modules outside the package add one of each kind through `plugins`; a run with all equals the
built-in one."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import data_row, metrics_of
from test_local_step import run_locally

from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.ppo import ray_trainer as ppo_trainer


def test_a_run_whose_parts_come_from_plugins_equals_the_built_in_one(
    tmp_path: Path, tiny_llama: Callable, plugins: str
):
    settings = [
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "actor_rollout_ref.actor.clip_ratio=0.05",
    ]
    settings += ["actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.optim.lr=1e-2"]
    settings += ["reward.num_workers=1"]  # which imports the plugins, and torch with them
    built_in = ["algorithm.adv_estimator=dr_grpo", "actor_rollout_ref.actor.clip_ratio_c=1000.0"]
    run_locally(tmp_path / "built_in", tiny_llama, *settings, *built_in)
    (tmp_path / "plugin.jsonl").write_text(
        "\n".join(
            json.dumps(
                data_row(i, f"{i}+{i + 1}", str(2 * i + 1)) | {"data_source": "source/of_plugin"}
            )
            for i in range(8)
        )
    )
    of_plugins = [
        plugins,
        "algorithm.adv_estimator=centred_by_plugin",
        "algorithm.options.scale=2.0",
        "actor_rollout_ref.actor.policy_loss.loss_mode=form_of_verl",
        "actor_rollout_ref.rollout.name=engine_of_plugin",
        "custom_reward_function.path=null",
        *(f"data.{part}_files={tmp_path}/plugin.jsonl" for part in ("train", "val")),
    ]
    run_locally(tmp_path / "plugin", tiny_llama, *settings, *of_plugins)
    assert ppo_trainer.get_trainer().__name__ == "TrainerOfPlugin"
    for expected, step in zip(
        metrics_of(tmp_path / "built_in"), metrics_of(tmp_path / "plugin"), strict=True
    ):
        names = [
            name for name in step if name.startswith(("actor/", "critic/")) and "/perf/" not in name
        ]
        assert {"actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/score/mean"} <= set(
            names
        )
        assert {name: step[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-5, abs=1e-7
        )
        assert step["actor/pg_clipfrac"] > 0 and step["actor/grad_norm"] > 0


def test_the_process_of_a_worker_imports_the_plugins_before_it_makes_the_worker(tmp_path: Path):
    (tmp_path / "seen_by_worker.py").write_text("SEEN = True\n")
    built = ClassWithInitArgs(dict, size=3)
    built.plugins = ("seen_by_worker",)
    program = (
        "import pickle, sys\nsys.path.insert(0, sys.argv[1])\n"
        "worker = pickle.loads(bytes.fromhex(sys.argv[2]))()\n"
        "assert worker == {'size': 3} and sys.modules['seen_by_worker'].SEEN\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), pickle.dumps(built).hex()],
        check=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "line", ["raise SystemExit('no licence')", "import no_such_module", "1 / 0"]
)
def test_a_plugin_that_cannot_be_imported_is_refused_with_its_name(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "ending_plugin.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"plugins: ending_plugin cannot be imported \((SystemExit|M|Z)"
    ):
        load_ppo_config(
            [
                "data.train_files=t",
                "data.val_files=v",
                "actor_rollout_ref.model.path=m",
                "plugins=[ending_plugin]",
            ]
        )
