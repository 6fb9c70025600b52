"""PPO from Python: the example, what it saves, and the listing of docs/python.md."""

import json
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import SGD, AdamW
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from examples.python_way import ppo_from_scratch
from examples.python_way.ppo_from_scratch import config, prompts, tokenizer
from verl_like.simple import (
    Actor,
    Critic,
    FsdpStrategy,
    NaiveStrategy,
    PPOTrainer,
    RewardModel,
    Strategy,
)
from verl_like.train import require_reward_fn
from verl_like.trainer.ppo import ray_trainer as ppo_trainer
from verl_like.trainer.ppo.local_trainer import LocalTrainer

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text()
LISTINGS: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_trainer(strategy: Strategy, load: str | None = None, **options: object) -> PPOTrainer:
    """A trainer of small models of the example's configuration, which starts from what was saved as
    `load`."""
    with strategy.model_init_context():
        actor, critic = Actor(config=config), Critic()
    reference, reward_model = (
        deepcopy(actor),
        RewardModel(deepcopy(critic.model), deepcopy(critic.value_head)),
    )
    actor_optim, critic_optim = (AdamW(model.parameters(), lr=1e-3) for model in (actor, critic))
    if load:
        strategy.load_model(actor, load)
        strategy.load_optimizer(actor_optim, f"{load}_optimizer")
    models = actor, critic, reward_model, reference, actor_optim, critic_optim
    return PPOTrainer(strategy, *models, tokenizer=tokenizer, max_length=16, **options)


def test_the_reward_rises_and_what_is_saved_loads_in_transformers_and_goes_on():
    scores = ppo_from_scratch.main()
    assert len(scores) == 12 and mean(scores[-3:]) > mean(scores[:3]) + 0.02
    saved = AutoModelForCausalLM.from_pretrained("actor")
    assert all(p.dtype == torch.float32 for p in saved.parameters())

    again = make_trainer(NaiveStrategy(seed=2), load="actor")
    actor, reference = again.models["actor"], again.models["ref"]
    loaded = dict(actor.hf.named_parameters())
    assert all(torch.equal(p, loaded[name]) for name, p in saved.named_parameters())
    # The steps go on from those 24 that were saved; nothing changes with a learning rate of 0 but
    # the moments.
    again.optimizers["actor"].param_groups[0]["lr"] = 0.0
    (row,) = again.fit(prompts, max_timesteps=1)
    assert row["actor/reward_kl_penalty"] > 0.01  # to the reference, which was not loaded
    assert not torch.equal(reference.hf.lm_head.weight, actor.hf.lm_head.weight)
    assert all(torch.equal(p, loaded[name]) for name, p in actor.hf.named_parameters())
    again.strategy.save_optimizer(again.optimizers["actor"], "later")
    before, after = (
        next(Path(name).glob("*.safetensors")) for name in ("actor_optimizer", "later")
    )
    name = "optimizer.lm_head.weight.step"
    assert (load_file(before)[name].item(), load_file(after)[name].item()) == (24, 25)


def test_an_optimizer_state_is_loaded_bit_for_bit_and_no_model_or_schedule_with_it(
    monkeypatch: pytest.MonkeyPatch,
):
    first = make_trainer(NaiveStrategy(seed=3))
    first.fit(prompts, max_timesteps=2)
    Path("moments").mkdir()
    Path("moments/rank_00001.safetensors").write_text("of an older save by two ranks")
    first.strategy.save_optimizer(first.optimizers["actor"], "moments", only_rank0=False)
    assert len([*Path("moments").glob("*.safetensors")]) == 1
    saved = load_file(next(Path("moments").glob("*.safetensors")))
    started: dict[str, torch.Tensor] = {}
    fit = LocalTrainer.fit

    def fit_from_what_is_loaded(trainer: LocalTrainer) -> None:
        state = trainer.groups["actor"].workers[0].engine._state()
        started.update(
            {
                name: getattr(value, "full_tensor", value.clone)().clone()
                for name, value in state.items()
            }
        )
        fit(trainer)

    monkeypatch.setattr(LocalTrainer, "fit", fit_from_what_is_loaded)
    second = make_trainer(
        NaiveStrategy(seed=4), overrides=["actor_rollout_ref.actor.optim.lr_scheduler_type=linear"]
    )
    second.strategy.load_optimizer(second.optimizers["actor"], "moments")
    expected = saved | {
        f"model.{name}": p.clone() for name, p in second.models["actor"].hf.named_parameters()
    }
    expected["training_steps"] = torch.tensor(0)
    (row,) = second.fit(prompts, max_timesteps=1)
    assert (
        saved["training_steps"] == 2
        and saved["optimizer.lm_head.weight.exp_avg"].any()
        and row["actor/lr"] == 1e-3
    )
    assert expected.keys() == started.keys()
    for name, value in started.items():
        assert torch.equal(value, expected[name]), name


PLUGIN = """
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, register_trainer

@register_trainer
class Counting(RayPPOTrainer):
    def step(self, *prompts):
        return super().step(*prompts) | {"plugin/steps": self.global_step}
"""


def test_overrides_reach_all_of_the_training(monkeypatch: pytest.MonkeyPatch):
    rows = [{"text": "12+34=46"}, {"text": "5+5=10"}]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = [
        "actor_rollout_ref.actor.ptx_coef=0.5",
        "data.ptx_files=rows.jsonl",
        "data.ptx_batch_size=2",
    ]
    overrides += ["algorithm.use_kl_in_reward=false", "plugins=[own_plugin]"]
    Path("own_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setattr(ppo_trainer.TRAINERS, "entries", {})
    trainer = make_trainer(NaiveStrategy(), overrides=overrides)
    (row,) = trainer.fit(prompts, max_timesteps=1)
    assert row["actor/ptx_loss"] > 1.0  # nats per token: about log of the vocabulary's 15
    assert row["plugin/steps"] == 1 and "actor/reward_kl_penalty" not in row


def test_overrides_take_away_roles_and_steps_and_an_adapter_is_merged_and_has_the_initial_model_as_reference():
    overrides = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=2",
    ]
    trainer = make_trainer(
        NaiveStrategy(), overrides=[*overrides, "actor_rollout_ref.model.lora_rank=4"]
    )
    torch.nn.init.normal_(trainer.models["ref"].hf.lm_head.weight, std=0.5)
    before = {role: deepcopy(model.hf.state_dict()) for role, model in trainer.models.items()}
    rows = trainer.fit(prompts, max_timesteps=1)
    assert len(rows) == 2
    # To the actor without its adapter, which is new, it is 0
    assert rows[0]["actor/reward_kl_penalty"] > 0.01
    changed = [
        role
        for role, model in trainer.models.items()
        if not all(
            torch.equal(value, before[role][name]) for name, value in model.hf.state_dict().items()
        )
    ]
    assert changed == ["actor"] and not hasattr(trainer.optimizers["critic"], "state_folder")
    assert trainer.optimizers["actor"].state_folder is None  # the adapter is merged


def test_a_critic_takes_what_the_actor_before_it_took():
    strategy = NaiveStrategy()
    with strategy.model_init_context():
        strategy.save_model(Actor(config=config), "actor")
        three_layers = deepcopy(config)
        three_layers.num_hidden_layers = 3
        strategy.save_model(Critic(config=three_layers), "critic")
        actor = Actor("actor")
        critics = [Critic()]
        reward_model = RewardModel(deepcopy(critics[0].model), deepcopy(critics[0].value_head))
        critics.append(Critic())
        Critic("critic")
        critics.append(Critic())
    for critic in critics:
        assert all(map(torch.equal, critic.model.parameters(), actor.model.parameters()))
    tokens = torch.tensor([[5, 6, 7]])
    critic = critics[0]
    assert torch.equal(
        reward_model.hf(input_ids=tokens).logits, critic.hf(input_ids=tokens).logits[:, -1]
    )
    with torch.no_grad():
        critic.value_head.bias.fill_(3.0)
    with pytest.raises(
        ValueError, match=r"the value head has a bias of 3\.0, and a reward model's head has none"
    ):
        RewardModel(critic.model, critic.value_head)


def test_an_optimizer_with_more_or_less_than_fit_trains_by_is_refused():
    trainer = make_trainer(NaiveStrategy())
    critic = trainer.models["critic"]
    first, *rest = critic.parameters()
    for wrong in (
        SGD(critic.parameters(), lr=1.0),
        AdamW(critic.parameters(), betas=(0.9, 0.95)),
        AdamW(critic.parameters(), amsgrad=True),
        AdamW([{"params": [first]}, {"params": rest, "weight_decay": 0.0}]),
        AdamW(critic.value_head.parameters()),
        AdamW(deepcopy(critic).parameters()),
        AdamW(critic.parameters()),
    ):
        trainer.optimizers["critic"] = wrong
        first.requires_grad_(type(wrong) is SGD)  # and the last one is wrong in that alone
        with pytest.raises(
            ValueError,
            match="fit trains all parameters of the critic as one group by torch's AdamW",
        ):
            trainer.fit(prompts)


def test_a_model_of_which_the_folder_lacks_a_part_is_refused_or_keeps_it():
    strategy = NaiveStrategy()
    with strategy.model_init_context():
        actor, critic = Actor(config=config), Critic()
    strategy.save_model(actor, "saved")
    head = critic.value_head.weight.clone()
    with pytest.raises(
        ValueError, match=r"saved is no LlamaForTokenClassification: it lacks \['score"
    ):
        strategy.load_model(critic, "saved")
    strategy.load_model(critic, "saved", strict=False)
    assert torch.equal(critic.value_head.weight, head)
    assert torch.equal(critic.hf.model.embed_tokens.weight, actor.hf.model.embed_tokens.weight)


def test_what_cannot_be_is_refused():
    strategy = NaiveStrategy()
    with strategy.model_init_context():
        with pytest.raises(
            ValueError, match=r"Critic\(\) names no model, and no actor was made before it"
        ):
            Critic()
        actor = Actor(config=config)
    optimizer = AdamW(actor.parameters())
    assert strategy.prepare((actor, optimizer)) == (actor, optimizer)
    with pytest.raises(ValueError, match="leave it True"):
        strategy.save_model(actor, "actor", only_rank0=False)
    with pytest.raises(ValueError, match="call it after such a fit"):
        strategy.save_optimizer(optimizer, "optimizer")
    with pytest.raises(ValueError, match="optimizer has no safetensors file"):
        strategy.load_optimizer(optimizer, "optimizer")


def test_the_first_listing_of_the_page_has_a_configuration_and_a_function_that_train_takes():
    before_training, _, _ = LISTINGS[0].partition("run = train(")
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(before_training, "docs/python.md", "exec"), variables)  # noqa: S102
    right_sum = variables["right_sum"]
    require_reward_fn(variables["config"], right_sum)
    assert right_sum("sums", " 177", "177", {}) == 1.0
    assert right_sum("sums", "17", "177", {}) == 0.0
    assert variables["config"].actor_rollout_ref.rollout.n == 8


def run_script(source: str) -> None:
    Path("script.py").write_text(source)
    subprocess.run([sys.executable, "script.py"], check=True, timeout=300)


@pytest.mark.ray
@pytest.mark.proof
def test_the_listing_of_the_page_runs_and_goes_on_from_what_it_saved():
    own_tokenizer = deepcopy(tokenizer)
    own_tokenizer.chat_template = None
    own_tokenizer.save_pretrained("gpt2")
    tiny = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=2, n_head=4, eos_token_id=2
    )
    # In the place of the hub's, which has dropout as well
    GPT2LMHeadModel(tiny).save_pretrained("gpt2")
    listing, loads = [each for each in LISTINGS if "strategy." in each]
    run_script(listing)
    first = load_file("actor_checkpoint.pt/model.safetensors")
    assert not torch.equal(
        first["transformer.wte.weight"],
        load_file("gpt2/model.safetensors")["transformer.wte.weight"],
    )
    before, training = listing.split("trainer = PPOTrainer(")
    run_script(f"{before}{loads}trainer = PPOTrainer({training}")
    steps = [load_file(file) for file in Path("actor_optim_checkpoint.pt").glob("*.safetensors")]
    assert len(steps) == 2  # a file for each rank
    assert {part[name].item() for part in steps for name in part if name.endswith(".step")} == {4}


@pytest.mark.ray
@pytest.mark.proof
def test_strategies_of_several_processes_learn_what_one_does():
    learned = []
    for strategy in (
        NaiveStrategy(seed=5),
        FsdpStrategy(stage=2, num_processes=2, seed=5, offload=True),
    ):
        trainer = make_trainer(strategy)
        trainer.fit(prompts, max_timesteps=2)
        learned.append(dict(trainer.models["actor"].hf.named_parameters()))
    for name, parameter in learned[0].items():
        torch.testing.assert_close(learned[1][name], parameter, rtol=0, atol=1e-5)
