"""The dataflow in one process, without Ray: the debugger's way in, and the shortest one for a
reader."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from runs import metrics_of, tiny_run_settings
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples import local_grpo_step
from verl_like.protocol.padded import padded
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo import inputs as ppo_inputs
from verl_like.trainer.ppo import ray_trainer as ppo_trainer
from verl_like.trainer.ppo import workers as ppo_workers
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.scoring import RuleScorer
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state.resume import find_run
from verl_like.workers.agents.hosts import Description
from verl_like.workers.models.pretrained import load_tokenizer
from verl_like.workers.rollout import router
from verl_like.workers.rollout.router import ResponsesFuture

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def local_trainer(
    folder: Path,
    tiny_llama: Callable,
    *settings: str,
    steps: int = 2,
    with_rules: bool = True,
    config_file: tuple[str, Path] | None = None,
    agents: Description | None = None,
) -> Iterator[local_grpo_step.LocalTrainer]:
    """A trainer in this process whose workers are ready; `config_file` is the name and the folder
    of a YAML file. `agents` says which tools agents have."""
    folder.mkdir(exist_ok=True)
    length = ["trainer.n_gpus_per_node=1", f"trainer.total_training_steps={steps}"]
    config = load_ppo_config(
        [*tiny_run_settings(folder, tiny_llama), *length, *settings], *(config_file or ())
    )
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    datasets = [ppo_inputs.load_dataset(config, tokenizer, part) for part in ("train", "val")]
    own_classes = {
        role: ppo_workers.import_worker_class(role, path)
        for role, path in config.worker_classes.items()
    }
    rewards = ppo_inputs.start_reward_manager(config) if with_rules else None
    recorder = RunRecorder(config, PPO_DISPLAY, find_run(config)[0])
    trainer_class = type(
        "TrainerInThisProcess", (local_grpo_step.LocalTrainer, ppo_trainer.get_trainer()), {}
    )
    trainer = trainer_class(
        config,
        tokenizer,
        ppo_workers.build_role_worker_mapping(config, own_classes, agents),
        None,
        *datasets,
        RuleScorer(rewards, tokenizer, scores_every_row=True) if rewards else None,
        recorder,
        ppo_inputs.load_ptx_dataset(config, tokenizer),
    )
    trainer.init_workers()
    try:
        yield trainer
    finally:  # a run that goes on in the same folder needs its lock
        if rewards:
            rewards.close()
        recorder.close("Done.")


def run_locally(folder: Path, tiny_llama: Callable, *settings: str, **options: Any) -> RunRecorder:
    """Some steps in this process; what is in `folder` then is as after any run."""
    with local_trainer(folder, tiny_llama, *settings, **options) as trainer:
        trainer.fit()
    return trainer.recorder


def test_a_whole_ppo_step_runs_in_one_process_without_ray(tmp_path: Path, tiny_llama: Callable):
    recorder = run_locally(tmp_path, tiny_llama, "algorithm.use_kl_in_reward=true")
    assert not ray.is_initialized()
    last = metrics_of(tmp_path)[-1]
    assert last["step"] == 2 and last["actor/grad_norm"] > 0 and last["critic/grad_norm"] > 0
    assert last["training/rollout_probs_diff_max"] < 1e-4
    speeds = {f"perf/mfu/{phase}" for phase in ("actor", "actor_infer", "ref", "values", "critic")}
    assert {
        *speeds,
        "actor/perf/cpu_memory_used_gb",
        "critic/perf/cpu_memory_used_gb",
    } <= last.keys()
    rows = [
        json.loads(line) for line in (recorder.run_dir / "timeline.jsonl").read_text().splitlines()
    ]
    assert {row["step"] for row in rows if row["method"] == "update_actor"} == {1, 2}
    assert {"init_model", "export_weights", "load_weights"} <= {
        row["method"] for row in rows if row["step"] == 0
    }
    methods = {row["method"] for row in rows}
    assert {
        "generate_sequences",
        "compute_ref_log_prob",
        "update_critic",
        "update_actor",
        "load_weights",
    } <= methods


def test_the_example_of_one_grpo_step_updates_the_policy_without_ray(capsys: pytest.CaptureFixture):
    metrics = local_grpo_step.main()
    assert not ray.is_initialized()
    assert metrics["actor/grad_norm"] > 0 and "critic/grad_norm" not in metrics
    assert capsys.readouterr().out.count("advantage") == 2 * 4  # prompts x samples


def test_the_grpo_recipe_trains_without_a_critic_and_with_the_kl_in_the_loss(
    tmp_path: Path, tiny_llama: Callable
):
    recipe = "toy", ROOT / "examples/grpo/config"
    run_locally(tmp_path, tiny_llama, "trainer.val_before_train=false", steps=1, config_file=recipe)
    (step,) = metrics_of(tmp_path)
    assert step["actor/grad_norm"] > 0 and step["actor/kl_coef"] == 0.001
    assert "critic/grad_norm" not in step and "actor/reward_kl_penalty" not in step


def test_checkpoints_in_the_critics_warm_up_change_nothing_and_the_actors_schedule_ends_with_the_run(
    tmp_path: Path, tiny_llama: Callable
):
    settings = ["trainer.critic_warmup=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    settings += [
        f"{part}.optim.lr_scheduler_type=linear" for part in ("actor_rollout_ref.actor", "critic")
    ]
    run_locally(tmp_path / "saving", tiny_llama, *settings, "trainer.save_freq=1", steps=3)
    run_locally(tmp_path / "not_saving", tiny_llama, *settings, steps=3)
    saving, not_saving = metrics_of(tmp_path / "saving"), metrics_of(tmp_path / "not_saving")
    for a, b in zip(saving, not_saving, strict=True):
        different = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)} - {
            "reward/early_ratio"
        }
        assert [
            name
            for name in different
            if not name.startswith(("timing_s/", "perf/")) and "/perf/" not in name
        ] == []
    # Three steps train the critic and the last two the actor.
    assert [row["critic/lr"] for row in saving] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert [row.get("actor/lr") for row in saving] == [None, 1e-3, 5e-4]


def test_rewards_are_the_same_whether_samples_are_scored_as_they_end_or_together(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    # Two responses at a time, each told as it ends.
    settings = ["actor_rollout_ref.rollout.max_num_seqs=2", "trainer.val_before_train=false"]
    monkeypatch.setattr(router, "COLLECT_S", 0.0)
    run_locally(tmp_path / "early", tiny_llama, *settings)
    monkeypatch.setattr(ResponsesFuture, "stream", lambda self: iter(()))
    run_locally(tmp_path / "together", tiny_llama, *settings)
    early, together = metrics_of(tmp_path / "early"), metrics_of(tmp_path / "together")
    assert [row["reward/early_ratio"] for row in early] == [1.0, 1.0]
    assert [row["reward/early_ratio"] for row in together] == [0.0, 0.0]
    for a, b in zip(early, together, strict=True):
        same = {name for name in a if a[name] == b[name]}
        timed = {name for name in a if name.startswith(("timing_s/", "perf/")) or "/perf/" in name}
        assert set(a) == set(b) and set(a) - same <= timed | {"reward/early_ratio"}
        assert {"critic/score/mean", "actor/pg_loss", "val-core/exact_match/acc/mean@1"} <= same


UNRELIABLE_REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    index = extra_info["index"]
    if index in (1, 5): return None
    if index in (2, 6): raise RuntimeError("no")
    if index == 3: time.sleep(60)
    return 2.0
"""


def test_validation_counts_what_it_could_not_score_as_0_and_says_how_much_that_was(
    tmp_path: Path, tiny_llama: Callable
):
    """Of eight prompts three are scored 2, two have no score, two fail, and one hangs."""
    (tmp_path / "unreliable.py").write_text(UNRELIABLE_REWARD)
    settings = [
        f"custom_reward_function.path={tmp_path}/unreliable.py",
        "reward.on_error=skip",
        "reward.timeout_s=0.5",
    ]
    run_locally(tmp_path, tiny_llama, *settings, "trainer.test_freq=-1", steps=1)
    validation, step = metrics_of(tmp_path)
    assert validation["val-core/exact_match/reward/mean@1"] == 3 * 2.0 / 8
    counts = {
        name: validation[f"val-aux/{name}"]
        for name in ("num_skipped", "num_errors", "num_timeouts")
    }
    assert counts == {"num_skipped": 5, "num_errors": 2, "num_timeouts": 1}
    assert "reward/num_skipped" in step and "val-aux/num_skipped" not in step


SERVED_REWARD = """
import json, pathlib

def compute_score(data_source, solution_str, ground_truth, extra_info, raw_prompt):
    with pathlib.Path(__file__).with_name("prompts").open("a") as prompts:
        prompts.write(json.dumps(raw_prompt) + "\\n")
    return {"score": 2.5, "acc": extra_info["index"] % 2}
"""


def test_a_reward_behind_a_url_rewards_in_training_and_in_validation(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "served.py").write_text(SERVED_REWARD)
    monkeypatch.setenv("VERL_LIKE_REWARD_TOKEN", "of-this-test")
    server_arguments = f"{tmp_path}/served.py", "--port=0", "--num-workers=1"
    command = [sys.executable, "-m", "examples.remote_reward.serve", *server_arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        run_locally(
            tmp_path,
            tiny_llama,
            f"custom_reward_function.path={url}",
            "trainer.test_freq=-1",
            steps=1,
        )
        server.terminate()
    assert server.returncode == 0
    validation, step = metrics_of(tmp_path)
    assert validation["val-core/exact_match/acc/mean@1"] == 0.5 and step["critic/score/mean"] == 2.5
    prompts = (tmp_path / "prompts").read_text().splitlines()
    assert len(prompts) == 8 + 4 * 2 and '[{"role": "user", "content": "0+1"}]' in prompts
    assert not [
        f
        for f in (tmp_path / "runs").rglob("*")
        if f.is_file() and b"of-this-test" in f.read_bytes()
    ]


OWN_ROLE = """
import torch
from verl_like.algorithms.masked import on_last_token
from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.worker import Worker


class Judge(Worker):
    reward_columns = {"judged": 0.5}

    def __init__(self, config):
        pass

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=["response_mask"], writes=["judged", "logged_scores"])
    def annotate(self, data):
        mask_BR = data.batch["response_mask"]
        judged_BR = on_last_token(torch.full((len(data),), 3.0), mask_BR)
        return DataProto.from_dict(tensors={"judged": judged_BR, "logged_scores": torch.full(mask_BR.shape, 100.0)})
"""


def test_a_role_of_ones_own_rewards_in_training_and_in_validation_alike(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_judge.py").write_text(OWN_ROLE)
    (tmp_path / "rule.py").write_text("def compute_score(**arguments):\n    return 0.25\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = [
        "worker_classes.judge=own_judge.Judge",
        "role_mapping.judge=global_pool",
        "trainer.test_freq=-1",
    ]
    run_locally(
        tmp_path, tiny_llama, *settings, f"custom_reward_function.path={tmp_path}/rule.py", steps=1
    )
    validation, step = metrics_of(tmp_path)
    assert (
        validation["val-core/exact_match/reward/mean@1"]
        == step["critic/score/mean"]
        == 0.25 + 0.5 * 3.0
    )


def test_a_reward_model_alone_rewards_in_training_and_in_validation(
    tmp_path: Path, tiny_llama: Callable
):
    policy, _ = tiny_llama()
    judge = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    judge.score.weight.data.fill_(0.25)
    judge.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "judge")
    settings = [
        "reward_model.enable=true",
        f"reward_model.model.path={tmp_path}/judge",
        "trainer.test_freq=-1",
    ]
    run_locally(
        tmp_path, tiny_llama, *settings, "algorithm.adv_estimator=grpo", steps=1, with_rules=False
    )
    validation, step = metrics_of(tmp_path)
    assert validation["val-core/exact_match/reward/mean@1"] != 0 and step["critic/score/mean"] != 0
    assert "val-core/exact_match/acc/mean@1" not in validation
    assert not [name for name in step if name.startswith("reward/")]


def test_two_reward_models_score_what_transformers_does_in_training_and_in_validation(
    tmp_path: Path, tiny_llama: Callable
):
    policy, _ = tiny_llama()
    judges, weights = {}, {"rm_scores": 0.3, "rm_scores/safety": -1.5}
    for seed, name in enumerate(weights):
        judges[name] = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
        judges[name].score.weight.data.normal_(generator=torch.Generator().manual_seed(seed))
        judges[name].save_pretrained(tmp_path / name)
    settings = [
        "reward_model.enable=true",
        f"reward_model.model.path={tmp_path}/rm_scores",
        "reward_model.weight=0.3",
    ]
    settings += [
        f"reward_models.safety.path={tmp_path}/rm_scores/safety",
        "reward_models.safety.weight=-1.5",
    ]
    settings += ["role_mapping.safety=global_pool", "algorithm.adv_estimator=gdpo"]
    settings += [
        "algorithm.gdpo_reward_keys=[rm_scores,rm_scores/safety]",
        "algorithm.gdpo_reward_weights=[1.0,4.0]",
    ]
    settings.append("algorithm.norm_adv_by_std_in_grpo=false")
    with local_trainer(tmp_path, tiny_llama, *settings, with_rules=False) as trainer:
        prompts = trainer.next_prompts()
        prompts.meta_info["global_steps"] = 1
        experience = trainer.maker.make(prompts)
        prompts.meta_info["validate"] = True
        validated, rewards, _ = trainer.maker.generate_and_score(prompts, 1)
    validated, trained, expected = padded(validated), padded(experience.batch), {}
    for batch, reward in (
        (validated, rewards),
        (trained, trained.batch["token_level_scores"].sum(-1)),
    ):
        for name, judge in judges.items():
            kept = zip(batch.batch["input_ids"], batch.batch["attention_mask"].bool(), strict=True)
            with torch.no_grad():
                last = torch.stack(
                    [judge.model(ids[mask][None]).last_hidden_state[0, -1] for ids, mask in kept]
                )
                expected[name] = judge.score(last).squeeze(-1)
            torch.testing.assert_close(
                batch.batch[name].sum(-1), expected[name], atol=1e-5, rtol=1e-4
            )
        total = sum(weight * expected[name] for name, weight in weights.items())
        torch.testing.assert_close(reward, total, atol=1e-5, rtol=1e-4)
    for name, scores in expected.items():
        assert experience.metrics[f"reward/{name}/mean"].value == pytest.approx(
            float(scores.mean()), rel=1e-4
        )
    # gdpo without standard deviations: 1 and 4 times the weighted scores, less the mean of the two
    # responses.
    summed = (0.3 * expected["rm_scores"] + 4.0 * -1.5 * expected["rm_scores/safety"]).view(-1, 2)
    mask = trained.batch["response_mask"].bool()
    tokens = (summed - summed.mean(1, keepdim=True)).view(-1, 1).expand(mask.shape)
    advantages = (tokens - tokens[mask].mean()) / tokens[mask].std() * mask
    torch.testing.assert_close(trained.batch["advantages"], advantages, atol=1e-3, rtol=1e-3)


def test_the_adaptive_kl_coefficient_moves_by_the_number_of_scored_responses(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=true",
        "trainer.val_before_train=false",
    ]
    settings += [
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "trainer.test_freq=-1",
    ]
    run_locally(tmp_path, tiny_llama, *settings, steps=2)
    first, second = (row["actor/reward_kl_penalty_coeff"] for row in metrics_of(tmp_path))
    # The policy starts as the reference, so the first KL is 0, by which the coefficient falls by
    # 0.2 * 8 / 10,000.
    assert first == 0.5 and second == pytest.approx(0.5 * (1 - 0.2 * 8 / 10_000), rel=1e-9)
