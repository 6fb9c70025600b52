"""docs/placement.md: its layouts and rows are configurations that give the pools it says; the
scripts of a cluster."""

import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_like.trainer.config import ConfigError, PPOConfig, load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.ppo.workers import build_resource_pools

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/placement.md").read_text()
CLUSTER = ROOT / "examples/cluster"
REQUIRED = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=my/model",
]
ALL_ROLES = [
    "algorithm.use_kl_in_reward=true",
    "reward_model.enable=true",
    "reward_model.model.path=my/judge",
]


def layouts() -> dict[int, list[str]]:
    """The page's overrides for 16 and for 32 GPUs."""
    commands = re.findall(r"^(\d+) GPUs[^`]*```bash\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    return {int(gpus): shlex.split(command.replace("\\\n", " ")) for gpus, command in commands}


def rows() -> list[tuple[str, str, str]]:
    """(theirs, here, pools) of the tables of flags and keys."""
    section = PAGE.partition("## From OpenRLHF and verl")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return [(theirs, here, pools) for theirs, here, pools in cells if here not in ("here", "---")]


def code_with_values(cell: str) -> list[str]:
    """The overrides that a cell shows."""
    spans = [span for span in re.findall(r"`([^`]+)`", cell) if "=" in span or "~" in span]
    return shlex.split(" ".join(spans))


def with_all_roles(*overrides: str) -> PPOConfig:
    if any(override.startswith("detached.") for override in overrides):
        return load_config(
            DetachedConfig, broken_detached_rules, [*REQUIRED, *ALL_ROLES, *overrides]
        )
    return load_ppo_config([*REQUIRED, *ALL_ROLES, *overrides])


def pools_of(config: PPOConfig) -> dict[str, tuple[list[int], list[str]]]:
    """Processes per node and the running roles of each pool."""
    return {
        pool: (
            list(sizes),
            [role for role in config.plan.active_roles if config.role_mapping[role] == pool],
        )
        for pool, sizes in config.resource_pool_spec.items()
    }


def value_of(config: PPOConfig, key: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for name in key.split("."):
        value = value[name]
    return value


def test_the_layouts_have_as_many_gpus_and_engines_as_the_page_says():
    sizes = {gpus: pools_of(with_all_roles(*overrides)) for gpus, overrides in layouts().items()}
    assert sizes == {
        16: {
            "actor_pool": ([4], ["actor"]),
            "critic_pool": ([4], ["critic"]),
            "ref_pool": ([2], ["ref"]),
            "reward_model_pool": ([2], ["reward_model"]),
            "rollout_pool": ([4], ["rollout"]),
        },
        32: {
            "actor_pool": ([4], ["actor"]),
            "critic_pool": ([4], ["critic"]),
            "ref_pool": ([4], ["ref"]),
            "reward_model_pool": ([4], ["reward_model"]),
            "rollout_pool": ([8, 8], ["rollout"]),
        },
    }
    for gpus, overrides in layouts().items():
        config = with_all_roles(*overrides)
        assert config.num_processes_of_run == gpus
        assert (
            config.num_processes("rollout")
            // config.actor_rollout_ref.rollout.tensor_model_parallel_size
            == 4
        )
        assert build_resource_pools(config).max_colocate_count == 1, "a GPU has one process"


@pytest.mark.parametrize(("theirs", "here", "pools"), rows())
def test_a_row_gives_the_pools_and_values_it_says(theirs: str, here: str, pools: str):
    overrides = code_with_values(here)
    if not overrides:
        assert here.startswith(("not built", "nothing to set")) and not pools
        return
    is_whole = overrides[0].startswith("placement=")
    config = with_all_roles(*([] if is_whole else layouts()[16]), *overrides)
    found = pools_of(config)
    said = {
        name: (yaml.safe_load(sizes), roles.split(", "))
        for name, sizes, roles in re.findall(r"`(\w+)` (\[[\d, ]+\]) ([\w, ]+)", pools)
    }
    assert said == (found if is_whole else {name: found[name] for name in said})
    for key, value in (override.split("=", 1) for override in overrides if "=" in override):
        if key != "placement":
            assert value_of(config, key) == yaml.safe_load(value), key


@pytest.mark.parametrize(
    "theirs", [theirs for theirs, here, _ in rows() if here.startswith("not built")]
)
def test_a_key_that_is_not_built_is_refused(theirs: str):
    for override in code_with_values(theirs):
        with pytest.raises(ConfigError, match="there is no such key"):
            with_all_roles(override)


def test_pools_of_presets_without_sizes_ask_for_those_of_the_running_roles():
    with pytest.raises(ConfigError) as error:
        load_ppo_config([*REQUIRED, "placement=separate", "resource_pool_spec.actor_pool=[4]"])
    assert str(error.value).splitlines() == [
        f"role_mapping.{role}={role}_pool: there is no such pool, only ['actor_pool']; size it, "
        f"e.g. resource_pool_spec.{role}_pool=[4]"
        for role in ("rollout", "critic")
    ]
    with pytest.raises(
        ConfigError, match=r"resource_pool_spec.ref_pool=\[2\] has none of this run's roles"
    ):
        load_ppo_config([*REQUIRED, *layouts()[16], "~resource_pool_spec.reward_model_pool"])
    grpo = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "resource_pool_spec.rollout_pool=[2]",
    ]
    config = load_ppo_config(
        [*REQUIRED, *grpo, "placement=pairs", "resource_pool_spec.actor_ref_pool=[4]"]
    )
    assert pools_of(config) == {
        "rollout_pool": ([2], ["rollout"]),
        "actor_ref_pool": ([4], ["actor"]),
    }


@pytest.mark.parametrize(
    ("preset", "keeps"), [("colocated", False), ("split", False), ("pairs", True)]
)
def test_engines_alone_on_their_devices_keep_their_memory(preset: str, keeps: bool):
    sizes = [
        f"resource_pool_spec.{pool}_pool=[4]"
        for pool in ("actor_ref", "critic_reward_model", "rollout")
    ]
    config = with_all_roles(f"placement={preset}", *(sizes if preset == "pairs" else []))
    assert config.actor_rollout_ref.rollout.free_cache_engine is not keeps


def test_the_job_of_the_cluster_scripts_is_the_layout_of_16_gpus_on_the_ray_that_runs():
    command = (CLUSTER / "train.sh").read_text().partition("verl_like.trainer.main_ppo ")[2]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[-1] == "$@"
    config = load_ppo_config([word.replace("$", "/") for word in words[:-1]])
    assert config.ray_kwargs.ray_init.address == "auto"
    assert pools_of(config) == pools_of(with_all_roles(*layouts()[16]))
    slurm = (CLUSTER / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", slurm, re.MULTILINE))
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == config.num_processes_of_run
    for starter in (slurm, (CLUSTER / "ray_job.sh").read_text()):
        assert re.search(
            r"bash \S*examples/cluster/train.sh\"? \"\$@\"( &)?$", starter, re.MULTILINE
        )


def test_the_slurm_script_gives_sigterm_to_the_driver_and_waits_for_its_exit_code(tmp_path: Path):
    folder = tmp_path / "examples/cluster"
    folder.mkdir(parents=True)
    (folder / "train.sh").write_text(
        "trap 'sleep 0.5; touch saved; exit 130' TERM\ntouch ready\nfor i in {1..600}; do sleep "
        "0.1; done"
    )
    script = (CLUSTER / "slurm.sh").read_text()
    tail = script[script.index("bash examples/cluster/train.sh") :]
    with subprocess.Popen(["bash", "-c", f"set -euo pipefail\n{tail}"], cwd=tmp_path) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=30) == 130
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("script", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_a_cluster_script_can_be_read_by_bash(script: Path):
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).stderr == b""
