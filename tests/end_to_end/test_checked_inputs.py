"""What the checks before a run accept: own algorithms, rows for the reward model, small
machines."""

import contextlib
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import SPLIT, tiny_run_settings
from tokenizers import normalizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerBase

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.inputs import check_inputs
from verl_like.trainer.ppo.workers import build_resource_pools
from verl_like.trainer.run.machine import check_machine
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.models import pretrained
from verl_like.workers.models.pretrained import load_tokenizer

OWN_ALGORITHMS = """
from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.aggregation import agg_loss
from verl_like.algorithms.policy_losses import register_policy_loss


@register_adv_est("own_estimator")
def estimate(token_level_rewards):
    return token_level_rewards, token_level_rewards


@register_policy_loss("own_loss")
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info), {}


"""


def test_an_estimator_and_a_loss_of_a_plugin_can_be_named(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_algorithms.py").write_text(OWN_ALGORITHMS)
    monkeypatch.syspath_prepend(tmp_path)
    own = [
        "plugins=own_algorithms",
        "algorithm.adv_estimator=own_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode=own_loss",
    ]
    config = load_ppo_config([*tiny_run_settings(tmp_path, tiny_llama), *own])
    with contextlib.ExitStack() as cleanup:
        inputs = check_inputs(config, cleanup)
    assert inputs.role_worker_mapping["actor"].plugins == ("own_algorithms",)
    del sys.modules["own_algorithms"]
    del ADVANTAGE_ESTIMATORS.entries["own_estimator"], POLICY_LOSSES.entries["own_loss"]


def test_a_tokenizer_that_reads_the_prompts_otherwise_than_its_file_is_refused(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    def rebuilt(model: TrainedModelConfig) -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(model)
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("+", "-")
        return tokenizer

    monkeypatch.setattr(pretrained, "load_tokenizer", rebuilt)
    config = load_ppo_config(tiny_run_settings(tmp_path, tiny_llama))
    with (
        contextlib.ExitStack() as cleanup,
        pytest.raises(ValueError, match=r"tokenizer.json: '0\+1=' becomes"),
    ):
        check_inputs(config, cleanup)


def model_rows(folder: Path) -> Path:
    """Rows that only a reward model can score."""
    row = {
        "data_source": "own",
        "prompt": [{"role": "user", "content": "1+2"}],
        "reward_model": {"style": "model"},
    }
    path = folder / "rows.jsonl"
    path.write_text("\n".join([json.dumps(row | {"extra_info": {"index": i}}) for i in range(8)]))
    return path


def test_fields_of_rows_that_a_checkpoint_cannot_hold_are_refused_where_it_holds_rows(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), "trainer.max_staleness=1"]
    settings += ["+resource_pool_spec.rollout_pool=[1]", "role_mapping.rollout=rollout_pool"]
    settings += ["algorithm.rollout_correction.bypass_mode=true", "trainer.n_gpus_per_node=1"]
    rows = pq.read_table(tmp_path / "data.parquet").to_pylist()
    for row in rows:
        row["extra_info"]["when"] = datetime.date(2024, 5, 17)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    with (
        contextlib.ExitStack() as cleanup,
        pytest.raises(ValueError, match=r"extra_info.*'when'\] is a date, which"),
    ):
        check_inputs(load_ppo_config(settings), cleanup)


def test_rows_with_style_model_need_a_reward_model_or_a_role_that_rewards_and_then_no_rule(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    rows = model_rows(tmp_path)
    settings = [*tiny_run_settings(tmp_path, tiny_llama), "custom_reward_function.path=null"]
    settings += [f"data.train_files={rows}", f"data.val_files={rows}"]
    with (
        contextlib.ExitStack() as cleanup,
        pytest.raises(ValueError, match="nothing rewards the responses"),
    ):
        check_inputs(load_ppo_config(settings), cleanup)
    # The training rows of the tiny run have rules; beside them, those of the validation would count
    # 0 unnoticed.
    mixed = [
        *tiny_run_settings(tmp_path, tiny_llama),
        "custom_reward_function.path=null",
        f"data.val_files={rows}",
    ]
    with (
        contextlib.ExitStack() as cleanup,
        pytest.raises(ValueError, match="nothing rewards the responses to 8 of 16"),
    ):
        check_inputs(load_ppo_config(mixed), cleanup)
    judge, _ = tiny_llama()
    LlamaForSequenceClassification(
        LlamaConfig.from_pretrained(judge, num_labels=1)
    ).save_pretrained(judge)
    config = load_ppo_config(
        [*settings, "reward_model.enable=true", f"reward_model.model.path={judge}"]
    )
    with contextlib.ExitStack() as cleanup:
        assert check_inputs(config, cleanup).scorer is None
    role = (
        "worker_classes.judge=examples.new_role.likelihood.LikelihoodWorker",
        "role_mapping.judge=global_pool",
    )
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    with contextlib.ExitStack() as cleanup:
        assert check_inputs(load_ppo_config([*settings, *role]), cleanup).scorer is None


def test_dynamic_sampling_needs_a_rule_for_every_training_row(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        "custom_reward_function.path=null",
        f"data.train_files={model_rows(tmp_path)}",
        "worker_classes.judge=examples.new_role.likelihood.LikelihoodWorker",
        "role_mapping.judge=global_pool",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
    ]
    with (
        contextlib.ExitStack() as cleanup,
        pytest.raises(
            ValueError, match=r"but 8 of 8 training rows have reward_model\.style 'model'"
        ),
    ):
        check_inputs(load_ppo_config(settings), cleanup)


@pytest.mark.parametrize("placement", [["placement=colocated"], SPLIT])
def test_the_cpu_preset_fits_a_machine_with_two_cores(placement: list[str]):
    required = [
        "data.train_files=a",
        "data.val_files=a",
        "actor_rollout_ref.model.path=a",
        "device=cpu",
    ]
    pools = list(
        build_resource_pools(load_ppo_config([*required, *placement])).resource_pool_dict.values()
    )
    num_cpus = load_ppo_config([*required, *placement]).ray_kwargs.ray_init.num_cpus
    check_machine(pools, "cpu", num_cpus, keys="resource_pool_spec")
