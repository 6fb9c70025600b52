"""PPO-ptx: the language-model loss beside the policy's, its rows and its rules."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_supervised import TEMPLATE
from test_workers_training import reference_policy_loss
from tiny_worker_models import (
    gradients_of,
    local_group,
    make_batch,
    policy_config,
    relative_error,
    write_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_like.data.conversations import ConversationDataset
from verl_like.protocol import metric_values
from verl_like.trainer.config import ConfigError, load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.ppo.inputs import load_ptx_dataset
from verl_like.workers.actor import ActorWorker
from verl_like.workers.models.packing import SEQUENCE_COLUMNS


@pytest.mark.parametrize("passes", [{"micro": 8}, {"micro": 3}, {"budget": 12}])
def test_the_gradient_is_that_of_the_policy_loss_and_the_weighted_likelihood_in_float64(
    tmp_path: Path, passes: dict
):
    path, data = write_model(tmp_path), make_batch()
    rows = make_batch(rows=5, seed=1).select(batch_keys=[*SEQUENCE_COLUMNS])
    group = local_group(ActorWorker, policy_config(path, ptx_coef=0.3, **passes))
    gradients, output = gradients_of(group.workers[0], lambda: group.update_actor(data, rows).get())
    hf = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    policy_loss, log_probs = reference_policy_loss(hf, data), []
    for prompt, response in zip(
        rows.batch["prompts"].unbind(), rows.batch["responses"].unbind(), strict=True
    ):
        logits = hf(torch.cat([prompt, response])[None]).logits[0, -len(response) - 1 : -1]
        of_all = logits.log_softmax(-1)  # at a temperature of 1, whatever the rollout has
        log_probs.append(of_all.gather(-1, response[:, None])[:, 0])
    ptx_loss = -torch.cat(log_probs).mean()
    (policy_loss + 0.3 * ptx_loss).backward()
    metrics = metric_values(output.meta_info["metrics"])
    assert (
        relative_error(gradients, {name: p.grad.float() for name, p in hf.named_parameters()})
        < 1e-5
    )
    assert metrics["actor/ptx_loss"] == pytest.approx(ptx_loss.item(), rel=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(policy_loss.item(), rel=1e-5)
    assert metrics["actor/loss"] == pytest.approx((policy_loss + 0.3 * ptx_loss).item(), rel=1e-5)


def test_each_optimizer_step_takes_its_own_rows_and_one_that_is_left_out_leaves_its_rows_out(
    tmp_path: Path,
):
    """Of the first mini-batch no token counts, so that the only step is that of the second one."""
    data, rows = make_batch(), make_batch(rows=4, seed=1).select(batch_keys=[*SEQUENCE_COLUMNS])
    data.batch["response_mask"].values()[: data.batch["response_mask"].offsets()[4]] = 0
    path, results = write_model(tmp_path), []
    for prompts, of_data, of_rows in ((4, data, rows), (8, data[slice(4, 8)], rows[slice(2, 4)])):
        group = local_group(ActorWorker, policy_config(path, prompts=prompts, ptx_coef=0.3))
        update = gradients_of(
            group.workers[0], lambda g=group, d=of_data, r=of_rows: g.update_actor(d, r).get()
        )
        results.append((update[0], metric_values(update[1].meta_info["metrics"])))
    (gradients, metrics), (expected, alone) = results
    assert relative_error(gradients, expected) < 1e-6
    assert metrics["actor/ptx_loss"] == pytest.approx(alone["actor/ptx_loss"], rel=1e-6)


def test_all_tokens_of_a_text_but_the_first_are_learned_and_a_long_row_is_cut(
    tiny_llama: Callable, tmp_path: Path
):
    path, _ = tiny_llama()
    file = tmp_path / "rows.jsonl"
    rows = [{"text": "12+34=46", "source": "sums"}, {"text": "1", "prompt": "1+2", "response": "3"}]
    file.write_text("\n".join(map(json.dumps, [*rows, {"text": "123456789" * 2}])))
    config = config_of(
        f"data.ptx_files={file}", *COEF, f"actor_rollout_ref.model.path={path}", *SHORT
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    dataset = load_ptx_dataset(config, tokenizer)
    columns = dataset.collate(range(3)).tensors()
    tokens = [
        torch.cat(parts)
        for parts in zip(columns["prompts"].unbind(), columns["responses"].unbind(), strict=True)
    ]
    learned = columns["response_mask"].unbind()
    assert "".join(tokenizer.convert_ids_to_tokens(tokens[0].tolist())) == "12+34=46<eos>"
    assert [len(tokens[row]) for row in (0, 2)] == [9, 12]
    assert [learned[row].sum() for row in (0, 2)] == [8, 11] and dataset.num_truncated == 1
    assert 0 < learned[1].sum() < len(tokens[1]) - 1, "a conversation"
    file.write_text('{"text": ""}')
    with pytest.raises(ValueError, match="row 0: none of the 1 tokens is learned"):
        ConversationDataset([str(file)], tokenizer, max_length=9)
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(
        ValueError, match=r"data\.ptx_files has 1 rows, fewer than data\.ptx_batch_size=3: add rows"
    ):
        load_ptx_dataset(config, tokenizer)


NEEDED = ["data.train_files=a", "data.val_files=a", "actor_rollout_ref.model.path=m", "device=cpu"]
COEF = [
    "actor_rollout_ref.actor.ptx_coef=0.5",
    "data.ptx_batch_size=3",
    "trainer.n_gpus_per_node=1",
]
SHORT = ["data.max_prompt_length=8", "data.max_response_length=4"]
SMALL = [
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=12",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
]


def config_of(*settings: str):
    return load_ppo_config([*NEEDED, *SMALL, *settings])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["actor_rollout_ref.actor.ptx_coef=0.5"],
            r"ptx_coef=0\.5 weighs the loss on data\.ptx_files=\[\]: give both",
        ),
        (
            ["data.ptx_files=x"],
            r"ptx_coef=0\.0 weighs the loss on data\.ptx_files=\['x'\]: give both or neither",
        ),
    ],
)
def test_rows_without_a_weight_and_a_weight_without_rows_are_refused(
    settings: list[str], message: str
):
    with pytest.raises(ConfigError, match=message):
        config_of(*settings)
    assert (
        config_of(*COEF, "data.ptx_files=x", "trainer.n_gpus_per_node=2").data.ptx_batch_size == 3
    )


def test_trainers_take_equal_parts_of_the_rows():
    settings = [*NEEDED, *SMALL, *COEF, "data.ptx_files=x", "detached.num_trainers=3"]
    config = load_config(DetachedConfig, broken_detached_rules, settings)
    assert config.of_trainer("trainer_1").data.ptx_batch_size == 1
    with pytest.raises(
        ConfigError, match=r"data\.ptx_batch_size=4 does not divide by detached\.num_trainers=3"
    ):
        load_config(DetachedConfig, broken_detached_rules, [*settings, "data.ptx_batch_size=4"])
    assert not list(
        broken_detached_rules(
            config.updated(
                {
                    "data.ptx_files": (),
                    "actor_rollout_ref.actor.ptx_coef": 0.0,
                    "data.ptx_batch_size": 4,
                }
            )
        )
    )
