"""Pairs of answers: which are taken, the losses in float64, and a reward model and DPO against
transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_supervised import TEMPLATE, loader, messages, write_rows
from tiny_worker_models import local_group, reward_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
)

from verl_like.algorithms.preferences import DPO_LOSSES, pairwise_loss, preference_metrics
from verl_like.data.preferences import PreferenceDataset
from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.padded import padded
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.supervised import (
    DPOConfig,
    RMConfig,
    SupervisedConfig,
    broken_supervised_rules,
)
from verl_like.trainer.loop.balancing import RowWork
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.supervised.run_supervised import (
    KINDS,
    SupervisedInputs,
    check_inputs,
    worker_arguments,
)
from verl_like.workers.models.packing import Rows, pack
from verl_like.workers.planning.flops import ModelCost
from verl_like.workers.reward_model import RewardModelWorker

PAIRS = [
    {"prompt": "ab", "chosen": "cde", "rejected": "f", "margin": 0.5},
    {"prompt": "g", "chosen": "h", "rejected": "ijklm"},
    {"prompt": "no", "chosen": "pq", "rejected": "rs", "margin": -1},
]
SPACE_AFTER_END = TEMPLATE.replace("'<eos>'", "'<eos> '")


@pytest.fixture(scope="module")
def model_path(tiny_llama: Callable) -> str:
    """A model whose template marks the turns, and writes a space behind an answer."""
    return tiny_llama(template=SPACE_AFTER_END)[0]


@pytest.fixture
def load(model_path: str, tmp_path: Path) -> Callable[..., PreferenceDataset]:
    return loader(PreferenceDataset, model_path, tmp_path)


def test_what_is_written_after_the_prompt_is_learned_and_a_pair_is_a_sample_of_two_rows(
    load: Callable, model_path: str, tmp_path: Path
):
    talk = messages(("user", "ab"), ("assistant", "c"), ("user", "d"))
    sides = {
        "chosen": [*talk, *messages(("assistant", "ef"))],
        "rejected": [*talk, *messages(("assistant", "g"))],
    }
    for row in (
        sides,
        {"prompt": talk, "chosen": "ef", "rejected": "g"},
        {"prompt": talk, **sides},
    ):
        dataset = load({**row, "margin": 2})
        batch = dataset.collate([0, 0])
        columns = padded(batch).tensors()
        assert columns["input_ids"].shape == (2 * 2, 13) and columns["response_mask"].shape == (
            2 * 2,
            12,
        )
        assert columns["margin"].tolist() == [2.0] * 4 and columns["sample_id"].tolist() == [
            0,
            0,
            1,
            1,
        ]
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        texts = [
            "".join(tokenizer.convert_ids_to_tokens(row)) for row in columns["input_ids"].tolist()
        ]
        assert texts == ["+ab-c<eos> +d-ef<eos>", "+ab-c<eos> +d-g<eos><pad>"] * 2
        assert columns["response_mask"].tolist() == [[0] * 9 + [1, 1, 1], [0] * 9 + [1, 1, 0]] * 2
        assert pack(Rows.of(batch)).position_ids.tolist() == [[*range(13), *range(12)] * 2]
    place = f"{tmp_path / 'rows.jsonl'}, row 0"
    assert (
        dataset.longest == (13, place)
        and dataset.largest == (13 + 12, place)
        and dataset.last_tokens == {1}
    )


def test_the_work_of_a_pair_is_that_of_two_sequences(load: Callable):
    pairs = load({"prompt": "ab", "chosen": "cd", "rejected": "e"}).collate([0, 0])
    cost = ModelCost(per_token=10.0, per_scored_token=100.0, per_pair=((1.0, None), (1000.0, 2)))
    # 7 and 6 tokens, of which 3 and 2 are learned; 28 and 21 token pairs, within a window of 2 13
    # and 11.
    work = RowWork.of(pairs, cost, balance=True)
    assert work.flops_B.tolist() == [70 + 300 + 28 + 13_000, 60 + 200 + 21 + 11_000] * 2
    assert work.sample_starts.tolist() == [0, 2, 4]
    assert sorted(rows.tolist() for rows in work.shares(num_ranks=2, num_of_step=2)) == [
        [0, 1],
        [2, 3],
    ]


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"prompt": "a", "response": "b"},
            {},
            r"rows.jsonl, row 0: field 'chosen' is missing, .* prompt, response,",
        ),
        (
            {"prompt": 5, "chosen": "a", "rejected": "b"},
            {},
            "row 0: field 'prompt' .* expected chosen and rejected, with ",
        ),
        (
            {"chosen": "a", "rejected": "b"},
            {},
            "row 0: chosen and rejected begin with different messages",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            {},
            "row 0: chosen and rejected are the same",
        ),
        (
            {"prompt": "a", "chosen": " ", "rejected": "b"},
            {},
            "row 0: turn 1, the assistant's, is empty",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": []},
            {},
            "row 0: field 'rejected' is an empty list",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "2"},
            {},
            "row 0: field 'margin' is str '2'",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": messages(("user", "b"))},
            {},
            "rejected is a conversation that ",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c" * 30},
            {},
            "row 0: .* 34 tokens, more than data.max_length=30",
        ),
        (
            {"prompt": "a", "chosen": "b" * 40, "rejected": "b" * 41},
            {"overlong": "truncate"},
            "row 0: chosen and rejected have the same 30 tokens among its first 30 tokens",
        ),
        (
            {"prompt": "a" * 40, "chosen": "b", "rejected": "c"},
            {"overlong": "truncate"},
            "none of the 30 tokens is learned",
        ),
        (
            {"prompt": "a" * 40, "chosen": "b", "rejected": "c"},
            {"overlong": "drop"},
            r"no pair .* \(1 are too long\)",
        ),
        ("ab", {}, "row 0: the row is str 'ab', expected an object"),
    ],
)
def test_pairs_that_prefer_nothing_are_named(
    load: Callable, row: Any, settings: dict, message: str
):
    with pytest.raises(ValueError, match=message):
        load(row, **settings)


def test_the_losses_are_those_of_their_papers():
    difference_B = np.array([-30.0, -1.2, 0.0, 0.3, 4.0])
    p_B = 1 / (1 + np.exp(-difference_B))
    given_B = torch.tensor(difference_B)
    np.testing.assert_allclose(pairwise_loss(given_B), -np.log(p_B), rtol=1e-12)
    p_B = 1 / (1 + np.exp(-0.4 * difference_B))
    np.testing.assert_allclose(
        DPO_LOSSES["dpo"](given_B, 0.4, 0.1), -0.9 * np.log(p_B) - 0.1 * np.log(1 - p_B), rtol=1e-12
    )
    np.testing.assert_allclose(
        DPO_LOSSES["ipo"](given_B, 0.4, 0.0), (difference_B - 1.25) ** 2, rtol=1e-12
    )


def test_the_metrics_of_pairs():
    metrics = preference_metrics(
        torch.tensor([2.0, 0.0, 1.0]).double(), torch.tensor([0.0, 3.0, 1.0]).double()
    )
    p = [1 / (1 + np.exp(-2)), 1 / (1 + np.exp(3)), 0.5]
    assert metrics["margin"].tolist() == [2, -3, 0] and metrics["accuracy"].tolist() == [1, 0, 0]
    np.testing.assert_allclose(metrics["confidence"], [p[0], 1 - p[1], 0.5])
    np.testing.assert_allclose(metrics["brier"], [(1 - p[0]) ** 2, (1 - p[1]) ** 2, 0.25])


def config_of(
    schema: type[SupervisedConfig], model_path: str, folder: Path, *settings: str
) -> SupervisedConfig:
    own = [
        f"data.train_files={write_rows(folder / 'train.jsonl', PAIRS)}",
        f"model.path={model_path}",
    ]
    own += [
        "trainer.device=cpu",
        "training.optim.lr=1e-2",
        "data.train_batch_size=3",
        "trainer.total_training_steps=3",
    ]
    return load_config(
        schema,
        broken_supervised_rules,
        [*own, f"trainer.default_local_dir={folder}/runs", *settings],
    )


def start(config: SupervisedConfig) -> tuple[SupervisedInputs, LocalWorkerGroup, DataProto]:
    """Checked inputs, a worker with its model, and the batch of all pairs."""
    inputs = check_inputs(config, None)
    worker = RayClassWithInitArgs(KINDS[type(config)].worker, *worker_arguments(inputs.config))
    group = LocalWorkerGroup(worker, 1, role="model")
    group.init_model()
    return inputs, group, inputs.train_dataset.collate([0, 1, 2])


def metrics_of(result: Any) -> dict[str, float]:
    return metric_values(result.get().meta_info["metrics"])


ADAPTER = ["model.lora_rank=4", "model.lora_alpha=6"]  # then the reference is the model under it
BY_ROW = ["training.use_dynamic_bsz=false", "training.micro_batch_size_per_gpu=1"]


@pytest.mark.parametrize("micro", [BY_ROW, ADAPTER])
def test_a_reward_model_learns_and_scores_alike_in_transformers_and_in_ppo(
    micro: list[str], model_path: str, tmp_path: Path
):
    _, group, batch = start(config_of(RMConfig, model_path, tmp_path, *micro))
    columns = padded(batch).tensors()  # of 6 rows: chosen and rejected of each pair

    def rewards_in_transformers() -> np.ndarray:
        group.save_hf(str(tmp_path / "model"))
        model = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "model", dtype=torch.float64
        )
        with torch.no_grad():
            scores = model(
                input_ids=columns["input_ids"], attention_mask=columns["attention_mask"]
            ).logits
        return scores.view(3, 2).numpy()

    rewards = rewards_in_transformers()
    difference = rewards[:, 0] - rewards[:, 1]
    losses = np.log1p(np.exp(-(difference - np.array([0.5, 0.0, -1.0]))))
    first = metrics_of(group.update_model(batch))
    assert first["rm/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert first["rm/margin"] == pytest.approx(difference.mean(), rel=1e-5)
    assert first["rm/brier"] == pytest.approx(
        ((1 / (1 + np.exp(difference))) ** 2).mean(), rel=1e-5
    )
    assert first["rm/num_tokens"] == (4 + 2) + (2 + 6) + (3 + 3)
    later = [metrics_of(group.update_model(batch)) for _ in range(2)]
    assert later[1]["rm/loss"] < later[0]["rm/loss"] < first["rm/loss"]

    rewards = rewards_in_transformers()
    assert metrics_of(group.evaluate(batch))["chosen_reward"] == pytest.approx(
        rewards[:, 0].mean(), rel=1e-4
    )
    ppo = local_group(RewardModelWorker, reward_config(str(tmp_path / "model")))
    responses = batch.select(batch_keys=["prompts", "responses", "response_mask"])
    scores_B = [
        row.sum() for row in ppo.compute_rm_score(responses).get().tensors()["rm_scores"].unbind()
    ]
    np.testing.assert_allclose(scores_B, rewards.reshape(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [BY_ROW, ["training.label_smoothing=0.2"], ["training.loss_type=ipo", *ADAPTER]]
)
def test_dpo_compares_the_policy_with_the_model_at_the_start(
    settings: list[str], model_path: str, tmp_path: Path
):
    config = config_of(DPOConfig, model_path, tmp_path, "training.beta=0.3", *settings)
    _, group, batch = start(config)
    columns = padded(batch).tensors()  # of 6 rows: chosen and rejected of each pair

    def log_probs(path: str) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        with torch.no_grad():
            logits = model(
                input_ids=columns["input_ids"], attention_mask=columns["attention_mask"]
            ).logits[:, :-1]
        of_tokens = logits.log_softmax(-1).gather(-1, columns["input_ids"][:, 1:, None])[..., 0]
        return (of_tokens * columns["response_mask"]).sum(-1).view(3, 2).numpy()

    first = metrics_of(group.update_model(batch))
    assert first["dpo/margin"] == first["dpo/chosen_reward"] == 0
    assert first["dpo/loss"] == pytest.approx(
        (1 / 0.6) ** 2 if "ipo" in settings[0] else np.log(2), rel=1e-6
    )
    group.update_model(batch).get()
    group.save_hf(str(tmp_path / "model"))
    ratios = log_probs(tmp_path / "model") - log_probs(model_path)
    difference = ratios[:, 0] - ratios[:, 1]
    p, smoothing = 1 / (1 + np.exp(-0.3 * difference)), config.training.label_smoothing
    losses = -(1 - smoothing) * np.log(p) - smoothing * np.log(1 - p)
    if config.training.loss_type == "ipo":
        losses = (difference - 1 / 0.6) ** 2
    last = metrics_of(group.update_model(batch))
    assert (
        last["dpo/loss"] == pytest.approx(losses.mean(), rel=1e-4)
        and last["dpo/loss"] < first["dpo/loss"]
    )
    assert last["dpo/chosen_reward"] == pytest.approx(0.3 * ratios[:, 0].mean(), rel=1e-4)
    assert last["dpo/margin"] == pytest.approx(0.3 * difference.mean(), rel=1e-4)
    assert last["dpo/accuracy"] == (difference > 0).mean() > 0


def test_a_checkpoint_of_another_model_is_refused(model_path: str, tmp_path: Path):
    _, policy, _ = start(config_of(DPOConfig, model_path, tmp_path))
    policy.save_checkpoint(str(tmp_path / "policy"))
    _, reward_model, _ = start(config_of(RMConfig, model_path, tmp_path))
    with pytest.raises(
        WorkerError, match=r"of another model: model\.lm_head\.weight is \[68, 64\] there, and None"
    ):
        reward_model.load_checkpoint(str(tmp_path / "policy"))


def test_a_padding_token_that_conversations_end_with_or_the_model_does_not_have_is_refused(
    model_path: str, tiny_llama: Callable, tmp_path: Path
):
    for pad_token_id in (1, -1):
        config = config_of(
            RMConfig, model_path, tmp_path, f"+model.override_config.pad_token_id={pad_token_id}"
        )
        expected = (
            rf"padding token {pad_token_id} of .* ends .* set model\.override_config\.pad_token_id"
        )
        with pytest.raises(ValueError, match=expected):
            check_inputs(config, None)
    config = check_inputs(config_of(RMConfig, model_path, tmp_path), None).config
    assert config.model.override_config == {"pad_token_id": 0}
    added, _ = tiny_llama(template=SPACE_AFTER_END)
    tokenizer = AutoTokenizer.from_pretrained(added)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(added)
    LlamaConfig.from_pretrained(added, pad_token_id=None).save_pretrained(added)
    with pytest.raises(
        ValueError, match=r"padding token 68 of .* is none of the model's 68 tokens"
    ):
        check_inputs(config_of(RMConfig, added, tmp_path), None)


def test_a_conversation_longer_than_the_model_reads_is_refused(model_path: str, tmp_path: Path):
    config = config_of(
        DPOConfig, model_path, tmp_path, "+model.override_config.max_position_embeddings=8"
    )
    with pytest.raises(
        ValueError, match=r"has 8 positions; .*row 1: the conversation has 9 tokens"
    ):
        check_inputs(config, None)


def test_a_pair_ends_with_a_token_that_ends_responses_of_the_policy(
    tiny_llama: Callable, tmp_path: Path
):
    """As Gemma's do, with an end of turn that the tokenizer does not name, and a character behind
    it."""
    turns = (
        "{% for m in messages %}+{{ m['content'] }}= {% endfor %}{% if add_generation_prompt "
        "%}+{% endif %}"
    )
    path, _ = tiny_llama(template=turns)
    tokenizer = AutoTokenizer.from_pretrained(path)
    end = tokenizer.convert_tokens_to_ids("=")
    GenerationConfig(eos_token_id=[1, end], pad_token_id=0).save_pretrained(path)
    dataset = check_inputs(config_of(RMConfig, path, tmp_path), None).train_dataset
    assert dataset.last_tokens == {end} and dataset.longest == (
        4 + 7,
        f"{tmp_path}/train.jsonl, row 1",
    )


def test_the_step_of_the_lowest_brier_score_is_the_best(model_path: str, tmp_path: Path):
    metric = "val-aux/brier"
    settings = [
        f"trainer.best_ckpt_metric={metric}",
        f"data.val_files={tmp_path}/train.jsonl",
        "trainer.logger=[]",
    ]
    recorder = RunRecorder(
        config_of(RMConfig, model_path, tmp_path, *settings), KINDS[RMConfig].display
    )
    assert [
        recorder.is_best(step, {metric: value}) for step, value in enumerate([0.3, 0.4, 0.2])
    ] == [True, False, True]


def test_settings_without_effect_are_refused(model_path: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"label_smoothing=0.2 has no effect on ipo"):
        config_of(
            DPOConfig,
            model_path,
            tmp_path,
            "training.loss_type=ipo",
            "training.label_smoothing=0.2",
        )
    with pytest.raises(ConfigError, match=r"parallel_size=3: a reward model reads whole sequences"):
        own = ["training.ulysses_sequence_parallel_size=3", "trainer.n_gpus_per_node=3"]
        config_of(RMConfig, model_path, tmp_path, *own)
    with pytest.raises(ConfigError, match=r"training.beta: there is no such key"):
        config_of(RMConfig, model_path, tmp_path, "training.beta=0.3")
