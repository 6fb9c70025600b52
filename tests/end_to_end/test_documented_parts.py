"""The maker, the critic and the trainer of docs/extending.md, and the role of docs/rewards.md, in
runs."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from runs import metrics_of
from test_local_step import local_trainer
from test_sft import TEMPLATE, config_in

from verl_like.protocol import metric_values
from verl_like.protocol.padded import padded
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.ppo import maker_driver
from verl_like.trainer.ppo import ray_trainer as ppo_trainer
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.supervised.display import SFT_DISPLAY
from verl_like.trainer.supervised.run_supervised import check_inputs, worker_arguments
from verl_like.workers.supervised import SFTWorker

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A function that makes the code block of a page that begins with `# <folder>/<name>.py` the
    module `<name>`, which workers can import."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ppo_trainer.TRAINERS, "entries", dict(ppo_trainer.TRAINERS.entries))
    monkeypatch.setattr(maker_driver.DRIVERS, "entries", dict(maker_driver.DRIVERS.entries))

    def module(page: str, name: str):
        blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        (code,) = [block for block in blocks if block.startswith(f"# my_run/{name}.py\n")]
        (tmp_path / f"{name}.py").write_text(code)
        return import_module(name)

    return module


def test_a_step_uses_the_maker_the_critic_and_the_role_of_the_pages(
    tmp_path: Path, tiny_llama: Callable, documented: Callable
):
    documented("extending.md", "my_maker")
    documented("extending.md", "my_critic")
    documented("rewards.md", "my_group_reward")
    settings = [
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "critic.ppo_mini_batch_size=4",
        "worker_classes.critic=my_critic.HuberCritic",
        "worker_classes.variety=my_group_reward.Variety",
        "role_mapping.variety=global_pool",
        "plugins=[my_maker]",
    ]
    with local_trainer(tmp_path / "run", tiny_llama, *settings) as trainer:
        prompts = trainer.next_prompts()
        prompts.meta_info["global_steps"] = 1
        experience = trainer.maker.make(prompts)
        made = metric_values(experience.metrics)
        learned = metric_values(trainer.learner.learn(experience).get())
    columns = padded(experience.batch).batch
    scores = columns["token_level_scores"]
    assert torch.equal(scores, columns["rule_scores"] + 0.2 * columns["variety_scores"])
    assert torch.equal(columns["token_level_rewards"], scores.clamp(-1.0, 1.0))
    assert made["reward/num_clipped"] == int((scores > 1.0).sum()) > 0
    errors = columns["values"] - columns["returns"]
    small = errors.abs() < 1.0
    huber = torch.where(small, errors**2 / 2, errors.abs() - 0.5)
    mask = columns["response_mask"].bool()
    assert learned["critic/vf_loss"] == pytest.approx(float(huber[mask].mean()), rel=1e-4)


def test_the_trainer_of_the_page_trains_a_model_on_the_shortest_rows_first(
    tmp_path: Path, tiny_llama: Callable, documented: Callable
):
    page = documented("extending.md", "my_trainer")
    model_path, _ = tiny_llama(template=TEMPLATE)
    config = config_in(tmp_path, model_path, "trainer.save_freq=-1")
    inputs = check_inputs(config, None)
    arguments = worker_arguments(inputs.config)
    group = LocalWorkerGroup(RayClassWithInitArgs(SFTWorker, *arguments), 1, role="model")
    recorder = RunRecorder(inputs.config, SFT_DISPLAY)
    trainer = page.ShortFirstTrainer(inputs.config, inputs.train_dataset, group, recorder)
    trainer.init_workers()
    lengths: list[int] = []
    for step in range(1, 6):  # of 33 rows, six a step
        trainer.global_step = step
        (experience,) = trainer.take()
        lengths += experience.work.tokens_B.tolist()
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    trainer.global_step = 0
    trainer.fit()
    recorder.close("Done.")
    losses = [row["sft/loss"] for row in metrics_of(tmp_path)]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert (recorder.run_dir / "global_step_6/model/huggingface/model.safetensors").exists()
