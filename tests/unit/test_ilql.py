"""ILQL: the losses in float64 and by hand, training against transformers and NumPy, checkpoints and
decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_supervised import TEMPLATE, messages, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_like.algorithms.ilql import ilql_losses
from verl_like.data.conversations import ScoredDataset
from verl_like.export import export
from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.padded import padded
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.supervised import ILQLConfig, broken_supervised_rules
from verl_like.trainer.supervised.run_supervised import check_inputs, worker_arguments
from verl_like.workers.models.ilql import AdvantageWeighting
from verl_like.workers.supervised import ILQLWorker

ROWS = [
    {"prompt": "ab", "response": "cde", "score": 0.5},
    {
        "messages": messages(
            ("user", "g"), ("assistant", "h"), ("user", "ijk"), ("assistant", "lm")
        ),
        "score": -2,
    },
    {"prompt": "no", "response": "pq", "score": 3.0},
]


@pytest.fixture(scope="module")
def model_path(tiny_llama: Callable) -> str:
    """A model whose template marks the turns."""
    path, _ = tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def terms_in_numpy(
    log_probs: np.ndarray,
    qs: np.ndarray,
    log_softmax_qs: np.ndarray,
    target_q: np.ndarray,
    values: np.ndarray,
    scores: np.ndarray,
    mask: np.ndarray,
    gamma: float,
    expectile: float,
    awac_beta: float,
) -> dict[str, np.ndarray]:
    """The terms token by token, from the last to the first; (2, B, R) of both heads, else (B,
    R)."""
    terms = {name: np.zeros(mask.shape) for name in ("td", "value", "cql", "lm")}
    for row in range(len(mask)):
        target = scores[row]
        for t in reversed(np.flatnonzero(mask[row])):
            u = target_q[row, t] - values[row, t]
            terms["td"][row, t] = sum((q[row, t] - target) ** 2 for q in qs)
            terms["value"][row, t] = abs(expectile - (u < 0)) * u**2
            terms["cql"][row, t] = -log_softmax_qs[0, row, t] - log_softmax_qs[1, row, t]
            terms["lm"][row, t] = -min(np.exp(awac_beta * u), 100) * log_probs[row, t]
            target = gamma * values[row, t]
    return terms


def random_inputs() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """log_probs, both q, both log-softmax, target_q and values; scores; a mask with gaps, and a row
    without a token."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]])
    columns = torch.randn(7, 4, 5, generator=generator, dtype=torch.float64) * mask
    scores = torch.randn(4, generator=generator, dtype=torch.float64)
    return [column.clone().requires_grad_() for column in columns], scores, mask


SETTINGS = {"gamma": 0.8, "expectile": 0.65, "awac_beta": 1.5}


def test_the_losses_are_those_of_the_paper():
    columns, scores, mask = random_inputs()
    arrays = [column.detach().numpy() for column in columns]
    expected = terms_in_numpy(
        arrays[0],
        np.stack(arrays[1:3]),
        np.stack(arrays[3:5]),
        *arrays[5:],
        scores.numpy(),
        mask.numpy(),
        **SETTINGS,
    )
    found = ilql_losses(*columns, scores=scores, mask=mask, **SETTINGS)
    assert found.keys() == expected.keys()
    for name, term in found.items():
        np.testing.assert_allclose(
            term.detach(), expected[name], rtol=1e-12, atol=1e-12, err_msg=name
        )


def test_the_losses_by_hand():
    """Two learned tokens around one of a user; the score 3 is the reward of the second, and 0.5 x V
    = 2 follows 4."""
    log_probs, q1, q2 = torch.tensor([[[-1.0, 0, -2]], [[5.0, 0, 1]], [[2.0, 0, 3]]])
    log_softmax1, log_softmax2 = torch.tensor([[[-0.5, 0, -1]], [[-0.25, 0, -4]]])
    target_q, values = torch.tensor([[[3.0, 0, 2]], [[1.0, 0, 4]]])
    columns = log_probs, q1, q2, log_softmax1, log_softmax2, target_q, values
    settings = {
        "scores": torch.tensor([3.0]),
        "mask": torch.tensor([[1, 0, 1]]),
        "gamma": 0.5,
        "expectile": 0.75,
    }
    found = ilql_losses(*columns, **settings, awac_beta=0.0)
    assert found["td"].tolist() == [[3.0**2 + 0, 0, 2.0**2 + 0]]  # the targets are 2 and 3
    assert found["value"].tolist() == [[0.75 * 2**2, 0, 0.25 * 2**2]]  # u is 2 and -2
    assert found["cql"].tolist() == [[0.75, 0, 5]] and found["lm"].tolist() == [[1, 0, 2]]
    heavy = ilql_losses(*columns, **settings, awac_beta=50.0)["lm"]
    assert heavy.tolist() == [[100, 0, pytest.approx(2 * np.exp(-100))]]


@pytest.mark.parametrize(
    ("term", "learning"),
    [
        ("td", {"q1", "q2"}),
        ("value", {"values"}),
        ("cql", {"log_softmax_q1", "log_softmax_q2"}),
        ("lm", {"log_probs"}),
    ],
)
def test_each_term_teaches_its_own_head_alone(term: str, learning: set[str]):
    columns, scores, mask = random_inputs()
    ilql_losses(*columns, scores=scores, mask=mask, **SETTINGS)[term].sum().backward()
    names = ("log_probs", "q1", "q2", "log_softmax_q1", "log_softmax_q2", "target_q", "values")
    gradients = {name: column.grad for name, column in zip(names, columns, strict=True)}
    assert {
        name for name, gradient in gradients.items() if gradient is not None and gradient.any()
    } == learning


@pytest.mark.parametrize("score", [None, "1", True, float("nan"), float("-inf"), 10**400, [1.0]])
def test_a_row_without_a_finite_score_is_named(score: Any, model_path: str, tmp_path: Path):
    files = [write_rows(tmp_path / "rows.jsonl", [ROWS[0], ROWS[1] | {"score": score}])]
    with pytest.raises(
        ValueError, match=r"rows.jsonl, row 1: field 'score' is .*, expected a finite number"
    ):
        ScoredDataset(files, AutoTokenizer.from_pretrained(model_path), max_length=30)


def config_of(model_path: str, folder: Path, *settings: str) -> ILQLConfig:
    own = [
        f"data.train_files={write_rows(folder / 'train.jsonl', ROWS)}",
        f"model.path={model_path}",
    ]
    own += [
        "trainer.device=cpu",
        "training.optim.lr=1e-2",
        "data.train_batch_size=3",
        "trainer.total_training_steps=3",
    ]
    own += [f"trainer.default_local_dir={folder}/runs", "training.polyak=0.125"]
    return load_config(ILQLConfig, broken_supervised_rules, [*own, *settings])


def start(config: ILQLConfig) -> tuple[LocalWorkerGroup, DataProto]:
    """A worker with its model, and the batch of all rows."""
    inputs = check_inputs(config, None)
    group = LocalWorkerGroup(
        RayClassWithInitArgs(ILQLWorker, *worker_arguments(inputs.config)), 1, role="model"
    )
    group.init_model()
    return group, inputs.train_dataset.collate([0, 1, 2])


def exported(group: LocalWorkerGroup, folder: Path) -> dict[str, torch.Tensor]:
    """The heads in the folder that the group writes."""
    group.save_hf(str(folder))
    return load_file(folder / "heads/model.safetensors")


def metrics_of(result: Any) -> dict[str, float]:
    return metric_values(result.get().meta_info["metrics"])


def run_in_numpy(folder: Path, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, np.ndarray]:
    """float64: log-probabilities and Q of all tokens, (B, T, V), and V (B, T), by transformers and
    the heads' file."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        outputs = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    hidden = outputs.hidden_states[-1].numpy()
    weights = {
        name: tensor.double().numpy()
        for name, tensor in load_file(folder / "heads/model.safetensors").items()
    }

    def head(name: str) -> np.ndarray:
        inner = np.maximum(hidden @ weights[f"{name}.0.weight"].T + weights[f"{name}.0.bias"], 0)
        return inner @ weights[f"{name}.2.weight"].T

    names = ("q1", "q2", "target_q1", "target_q2", "value")
    return {
        "log_probs": outputs.logits.log_softmax(-1).numpy(),
        **{name: head(name) for name in names},
    }


BY_ROW = [
    "training.use_dynamic_bsz=false",
    "training.micro_batch_size_per_gpu=1",
    "training.awac_beta=0.5",
]
ADAPTER = [
    "model.lora_rank=4",
    "model.lora_alpha=6",
    "training.gamma=0.7",
    "training.expectile=0.9",
]


@pytest.mark.parametrize("settings", [BY_ROW, ADAPTER])
def test_training_computes_what_transformers_and_numpy_do(
    settings: list[str], model_path: str, tmp_path: Path
):
    config = config_of(
        model_path, tmp_path, "training.cql_coef=0.3", "training.lm_coef=0.6", *settings
    )
    group, batch = start(config)
    group.update_model(batch).get()  # from then on the target heads differ from the others
    columns, training = padded(batch).tensors(), config.training
    ids, mask = columns["input_ids"], columns["response_mask"].numpy()
    old = exported(group, tmp_path / "model")
    at = {
        name: value[:, :-1]
        for name, value in run_in_numpy(tmp_path / "model", ids, columns["attention_mask"]).items()
    }
    labels = ids[:, 1:, None].numpy()

    def of_labels(values: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, labels, -1)[..., 0] * mask

    qs = [at["q1"], at["q2"]]
    target_q = np.minimum(of_labels(at["target_q1"]), of_labels(at["target_q2"]))
    terms = terms_in_numpy(
        of_labels(at["log_probs"]),
        np.stack([of_labels(q) for q in qs]),
        np.stack([of_labels(q) - np.log(np.exp(q).sum(-1)) * mask for q in qs]),
        target_q,
        at["value"][..., 0] * mask,
        np.array([0.5, -2.0, 3.0]),
        mask,
        training.gamma,
        training.expectile,
        training.awac_beta,
    )
    means = {name: term.sum() / mask.sum() for name, term in terms.items()}
    found = metrics_of(group.update_model(batch))
    for name, mean in means.items():
        assert found[f"ilql/{name}_loss"] == pytest.approx(mean, rel=1e-4), name
    assert found["ilql/loss"] == pytest.approx(
        means["td"] + means["value"] + 0.3 * means["cql"] + 0.6 * means["lm"], rel=1e-4
    )
    assert found["ilql/target_q"] == pytest.approx(target_q.sum() / mask.sum(), rel=1e-4)
    assert found["ilql/value"] == pytest.approx(
        (at["value"][..., 0] * mask).sum() / mask.sum(), rel=1e-4
    )
    new = exported(group, tmp_path / "model")
    for name in (name for name in new if name.startswith("target_")):
        online = new[name.removeprefix("target_")]
        torch.testing.assert_close(
            new[name], old[name] + 0.125 * (online - old[name]), rtol=1e-5, atol=1e-7
        )
        assert not torch.equal(new[name], old[name]) and not torch.equal(
            online, old[name.removeprefix("target_")]
        )


def heads_of(group: LocalWorkerGroup) -> dict[str, torch.Tensor]:
    """Copies of the heads as the worker holds them."""
    parameters = group.workers[0].engine.named_parameters()
    return {
        name: p.detach().full_tensor().clone()
        for name, p in parameters
        if name.startswith("heads.")
    }


@pytest.mark.parametrize("settings", [[], ADAPTER, ["model.fsdp_config.dtype=bfloat16"]])
def test_of_a_model_in_bfloat16_the_targets_are_averages_in_float32(
    settings: list[str], model_path: str, tmp_path: Path
):
    own = ["model.fsdp_config.model_dtype=bfloat16", "training.polyak=0.004", *settings]
    group, batch = start(config_of(model_path, tmp_path, *own))
    expected = {name: head.double() for name, head in heads_of(group).items() if "target_" in name}
    for _ in range(4):
        group.update_model(batch).get()
        heads = heads_of(group)
        for name, average in expected.items():
            average += 0.004 * (heads[name.replace("target_", "")].double() - average)
    for name, average in expected.items():
        assert (
            heads[name].dtype == torch.float32
            and heads[name.replace("target_", "")].dtype == torch.bfloat16
        )
        torch.testing.assert_close(heads[name].double(), average, rtol=1e-6, atol=1e-9)
    group.save_checkpoint(str(tmp_path / "role/checkpoint"))
    restored, _ = start(config_of(model_path, tmp_path, *own))
    restored.load_checkpoint(str(tmp_path / "role/checkpoint"))
    assert all(torch.equal(value, heads[name]) for name, value in heads_of(restored).items())


@pytest.mark.parametrize("settings", [[], ADAPTER])
def test_a_checkpoint_has_all_heads_and_its_export_is_the_folder_that_the_workers_write(
    settings: list[str], model_path: str, tmp_path: Path
):
    group, batch = start(config_of(model_path, tmp_path, *settings))
    group.update_model(batch).get()
    group.save_checkpoint(str(tmp_path / "role/checkpoint"))
    saved = load_file(tmp_path / "role/checkpoint/rank_00000.safetensors")
    assert {name.split(".")[2] for name in saved if name.startswith("optimizer.heads.")} == {
        "q1",
        "q2",
        "value",
    }
    restored, _ = start(config_of(model_path, tmp_path, "trainer.seed=7", *settings))
    restored.load_checkpoint(str(tmp_path / "role/checkpoint"))
    export(tmp_path / "role", tmp_path / "exported")
    for one in (group, restored):
        one.save_hf(str(tmp_path / "written"))
        files = {
            path.relative_to(tmp_path / "written") for path in (tmp_path / "written").rglob("*.*")
        }
        assert Path("heads/model.safetensors") in files and Path("model.safetensors") in files
        assert all(
            (tmp_path / "written" / f).read_bytes() == (tmp_path / "exported" / f).read_bytes()
            for f in files
        )
    assert (
        metrics_of(group.update_model(batch))["ilql/loss"]
        == metrics_of(restored.update_model(batch))["ilql/loss"]
    )
    after = [exported(one, tmp_path / "written") for one in (group, restored)]
    assert len(after[0]) == 15 and all(
        torch.equal(after[0][name], after[1][name]) for name in after[0]
    )


def test_an_adapter_that_is_exported_alone_has_the_heads_beside_it(model_path: str, tmp_path: Path):
    group, batch = start(config_of(model_path, tmp_path, *ADAPTER))
    group.update_model(batch).get()
    group.save_checkpoint(str(tmp_path / "role/checkpoint"))
    export(tmp_path / "role", tmp_path / "adapter", adapter_only=True)
    heads = exported(group, tmp_path / "written")
    beside = load_file(tmp_path / "adapter/heads/model.safetensors")
    assert beside.keys() == heads.keys()
    assert all(torch.equal(beside[name], heads[name]) for name in heads)
    values = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert values
    assert all(".lora_" in name for name in values)


def test_new_heads_follow_the_seed_and_those_of_an_export_go_on(model_path: str, tmp_path: Path):
    first, again, other = (
        exported(
            start(config_of(model_path, tmp_path, f"trainer.seed={seed}"))[0],
            tmp_path / f"model_{seed}",
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(first["q1.0.weight"], again["q1.0.weight"])
    assert not torch.equal(first["q1.0.weight"], other["q1.0.weight"])
    assert not torch.equal(first["q1.0.weight"], first["q2.0.weight"])
    assert torch.equal(first["q1.2.weight"], first["target_q1.2.weight"])
    went_on, _ = start(config_of(str(tmp_path / "model_2"), tmp_path, "trainer.seed=1"))
    found = exported(went_on, tmp_path / "went_on")
    assert all(torch.equal(found[name], other[name]) for name in other)


@pytest.mark.parametrize("beta", [0.0, 2.5])
def test_generation_draws_by_the_advantages(beta: float, model_path: str, tmp_path: Path):
    group, batch = start(config_of(model_path, tmp_path))
    group.update_model(batch).get()
    group.save_hf(str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[0, 0, 5, 9, 4], [3, 8, 7, 6, 2]])  # the first prompt is padded on the left
    mask = (ids != 0).long()
    weighting = AdvantageWeighting(model, beta)
    drawn = model.generate(
        input_ids=ids,
        attention_mask=mask,
        logits_processor=[weighting],
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=True,
        output_scores=True,
        return_dict_in_generate=True,
        top_k=0,
        temperature=1.0,
    )
    mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], dim=1)
    at = run_in_numpy(tmp_path / "model", drawn.sequences, mask)
    advantages = np.minimum(at["target_q1"], at["target_q2"]) - at["value"]
    for step, scores in enumerate(drawn.scores):
        log_probs = torch.tensor(at["log_probs"][:, 4 + step])
        log_probs[:, 1] = -torch.inf  # no end-of-sequence token before the fourth
        expected = log_probs.log_softmax(-1).numpy() + beta * advantages[:, 4 + step]
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    at_once = weighting(
        ids, model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, -1].detach()
    )
    np.testing.assert_allclose(
        at_once, at["log_probs"][:, 4] + beta * advantages[:, 4], rtol=1e-4, atol=1e-4
    )
    message = r"has no heads/model\.safetensors: load the model from an export of main_ilql"
    with pytest.raises(ValueError, match=message):
        AdvantageWeighting(AutoModelForCausalLM.from_pretrained(model_path), beta)
