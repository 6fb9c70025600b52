"""The same update in every layout: rows a pass, tokens a pass, ranks, sharding, sequence
parallelism, offload.

Processes start once: four of them run the layouts of four ranks, then two of these the layouts of
two. `make test` has most settings once, and `make proofs` all layouts.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import start_method
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_worker_models import (
    PROMPT,
    VOCABULARY,
    critic_config,
    gradients_of,
    local_group,
    make_batch,
    policy_config,
    relative_error,
)
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MiniCPM3Config,
)

from verl_like.protocol import Metric, merge_metrics, metric_values
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import jagged_parts
from verl_like.single_controller.worker import reserve_port
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.planning.partition import require_shares_of_heads

ROWS = 16
OBJECTIVE = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
BUDGET = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20}
REPLICATED = {"fsdp": {"strategy": "ddp"}}
WHOLE = {"fsdp": {"strategy": "zero1"}}
BFLOAT16 = {"fsdp": {"model_dtype": "bfloat16"}}
OFFLOAD = {
    "fsdp": {"param_offload": True, "optimizer_offload": True},
    "model": {"enable_activation_offload": True},
}
SHARED_BY_2 = {"ulysses_sequence_parallel_size": 2}
UNEVEN = {"shares": (0, 1, 10, 5)}
"""Rows of each rank, or of those that share them; equally many where a layout does not say."""

ACTORS = {
    1: {
        "all rows": {},
        "3 rows": {"micro": 3},
        "1 row": {"micro": 1},
        "budget": BUDGET,
        "offload": OFFLOAD,
    },
    2: {
        "sharded": {},
        "sequences shared": SHARED_BY_2,
        "gemma2": {},
        "minicpm3, sequences shared": SHARED_BY_2,
        "gpt_oss, sequences shared": SHARED_BY_2,
        "bfloat16": BFLOAT16,
        "bfloat16, 1 row": {"micro": 1, **BFLOAT16},
    },
    4: {
        "sharded": {},
        "1 row": {"micro": 1},
        "budget": BUDGET,
        "whole, 1 row": {"micro": 1, **WHOLE},
        "replicated": REPLICATED,
        "replicated, 1 row": {"micro": 1, **REPLICATED},
        "two copies": {"fsdp": {"fsdp_size": 2}},
        "two copies, 1 row": {"micro": 1, "fsdp": {"fsdp_size": 2}},
        "offload": {"micro": 1, **OFFLOAD},
        "sequences shared by 2": SHARED_BY_2,
        "sequences shared by 2, 1 row": {**SHARED_BY_2, "micro": 1},
        "sequences shared by 2, budget": {**SHARED_BY_2, **BUDGET},
        "sequences shared by 2, replicated": {**SHARED_BY_2, **REPLICATED},
        "sequences shared by 4, which are more than the key heads": {
            "ulysses_sequence_parallel_size": 4
        },
        "gemma2, sequences shared by 2": SHARED_BY_2,
        "uneven": UNEVEN,
        "uneven, 1 row": {"micro": 1, **UNEVEN},
        "uneven, budget": {**BUDGET, **UNEVEN},
        "uneven, replicated, 3 rows": {"micro": 3, **REPLICATED, **UNEVEN},
        "uneven, whole, 1 row": {"micro": 1, **WHOLE, **UNEVEN},
        "uneven, offload": {"micro": 1, **OFFLOAD, **UNEVEN},
        "uneven, sequences shared by 2": {**SHARED_BY_2, "micro": 4, "shares": (0, 16)},
        "uneven, sequences shared by 2, budget": {**SHARED_BY_2, **BUDGET, "shares": (15, 1)},
    },
}
IN_PROOFS_ALONE = {
    "budget",
    "two copies",
    "sequences shared by 2",
    "sequences shared by 2, 1 row",
    "sequences shared by 2, budget",
    "sequences shared by 2, replicated",
    "gemma2, sequences shared by 2",
    "uneven",
    "uneven, 1 row",
    "uneven, budget",
    "uneven, replicated, 3 rows",
    "uneven, whole, 1 row",
    "uneven, offload",
    "uneven, sequences shared by 2, budget",
}
"""Actors of four ranks whose settings others have, too."""
CRITICS = {
    1: {"all rows": {}},
    4: {
        "sharded": {},
        "sequences shared by 2, 1 row": {**SHARED_BY_2, "micro": 1},
        "uneven, 1 row": {"micro": 1, **UNEVEN},
    },
}
SEQUENCE_MEANS = {"loss_agg_mode": "seq-mean-token-mean"}
GSPO = {**SEQUENCE_MEANS, "policy_loss": {"loss_mode": "gspo"}}
SAMPLES = {
    1: {
        "vanilla, all samples": SEQUENCE_MEANS,
        "vanilla, 3 samples": {**SEQUENCE_MEANS, "micro": 3},
        "vanilla, budget": {**SEQUENCE_MEANS, **BUDGET, "ppo_max_token_len_per_gpu": 22},
        "gspo, all samples": GSPO,
        "gspo, 1 sample": {**GSPO, "micro": 1},
        "gspo, budget": {**GSPO, **BUDGET, "ppo_max_token_len_per_gpu": 22},
    },
    4: {
        "vanilla, 1 sample": {**SEQUENCE_MEANS, "micro": 1, "shares": (5, 5, 4, 2)},
        "gspo, replicated, budget": {**GSPO, **REPLICATED, **BUDGET, "shares": (3, 8, 0, 5)},
        "gspo, sequences shared by 2": {**GSPO, **SHARED_BY_2, "micro": 2, "shares": (10, 6)},
    },
}
"""Layouts of rows of which some are one sample."""
SAMPLE_IDS = [0, 0, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 9]
"""Of the rows: ten samples, of which six have two."""


class CountCollectives(TorchDispatchMode):
    """Counts the collectives called within it, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(
        **SIZES, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=None
    ),
    "gpt_oss": GptOssConfig(
        **SIZES,
        sliding_window=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    # Its attention is latent: values have another size than keys.
    "minicpm3": MiniCPM3Config(
        **SIZES | {"head_dim": 4, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        dim_model_base=32,
    ),
}


def actors(ranks, folder):
    """The layouts of actors that were computed in a folder, with their settings."""
    layouts = ACTORS[ranks]
    if ranks == 4 and folder.name == "some":
        layouts = {name: layouts[name] for name in layouts if name not in IN_PROOFS_ALONE}
    return layouts


def model_of(layout):
    """The name in MODELS, with which a layout of another model than Llama begins."""
    name = layout.partition(",")[0]
    return name if name in MODELS else "llama"


def make_actor(folder, layout, *, model=(), **settings):
    config = policy_config(
        str(Path(folder, model_of(layout))),
        prompts=ROWS,
        **{"micro": ROWS, **OBJECTIVE, **settings},
    )
    config = config.model_copy(update={"model": config.model.model_copy(update=dict(model))})
    return ActorWorker(config, with_sum_pi_squared=True)


def make_critic(folder, layout, **settings):
    return CriticWorker(
        critic_config(str(Path(folder, "llama")), prompts=ROWS, **{"micro": ROWS, **settings}),
        seed=1,
    )


def samples_of_one_or_two_rows():
    """Rows of ten samples. Some tokens of the responses are not scored, among them all of one
    sample."""
    rows = make_batch(rows=ROWS)
    rows.batch["sample_id"] = torch.tensor(SAMPLE_IDS)
    mask, starts = jagged_parts(rows.batch["response_mask"])
    mask[1::4] = 0
    mask[starts[2] : starts[3]] = 0
    return rows


def run(worker, mesh, rows, shares, output_path):
    """Scores and trains on this rank's shard, as the driver would send it; writes what its result
    is collected from."""
    worker.init_model()
    shard, is_collect = worker.query_dispatch_collect_info(mesh)
    first = sum(shares[:shard])
    rows = rows.select_idxs(list(range(first, first + shares[shard])))
    infer, train = (
        ("compute_log_prob", "update_actor")
        if mesh == "actor"
        else ("compute_values", "update_critic")
    )
    output = getattr(worker, infer)(rows)
    beside = rows.select(batch_keys=["prompts", "responses"]).union(output)
    scores = padded(beside, names=list(output.tensors())).batch
    with CountCollectives() as communication:
        gradients, output = gradients_of(worker, lambda: getattr(worker, train)(rows))
    if is_collect:
        metrics = {
            name: (m.value, m.reduction, m.weight)
            for name, m in output.meta_info["metrics"].items()
        }
        tensors = {f"score {name}": score for name, score in scores.items()} | gradients
        save_file(
            tensors,
            f"{output_path}_{shard}",
            {"metrics": json.dumps(metrics), "communication": json.dumps(communication.counts)},
        )


def run_layouts(rank, ranks, folder):
    for role, layouts, make in (
        ("actor", actors(ranks, Path(folder)), make_actor),
        ("critic", CRITICS.get(ranks, {}), make_critic),
        ("samples", SAMPLES.get(ranks, {}), make_actor),
    ):
        rows = samples_of_one_or_two_rows() if role == "samples" else make_batch(rows=ROWS)
        mesh = "critic" if role == "critic" else "actor"
        for layout, settings in layouts.items():
            num_shards = ranks // settings.get("ulysses_sequence_parallel_size", 1)
            shares = settings.get("shares", [ROWS // num_shards] * num_shards)
            worker = make(
                folder,
                layout,
                **{name: value for name, value in settings.items() if name != "shares"},
            )
            run(worker, mesh, rows, shares, Path(folder, f"{role} {ranks} {layout}"))


def run_rank(rank, ports, folder):
    torch.set_num_threads(1)
    for ranks, port in ports.items():
        if rank < ranks:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank)}
            run_layouts(rank, ranks, folder)
            dist.destroy_process_group()


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.proof)])
def folder(request, tmp_path_factory):
    """What every layout computed."""
    folder = tmp_path_factory.mktemp(request.param, numbered=False)
    for name, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    (holder_4, port_4), (holder_2, port_2) = reserve_port(), reserve_port()
    with holder_4, holder_2:
        start_processes(
            run_rank, ({4: port_4, 2: port_2}, str(folder)), nprocs=4, start_method=start_method()
        )
    run_layouts(0, 1, str(folder))
    return folder


def collected(folder, role, ranks, layout):
    """Scores of all rows, gradients, merged metrics and calls of collectives of one layout."""
    files = [safe_open(path, "pt") for path in sorted(folder.glob(f"{role} {ranks} {layout}_?"))]
    names = set(files[0].keys())
    scores = {
        n.removeprefix("score "): torch.cat([f.get_tensor(n) for f in files])
        for n in names
        if "score " in n
    }
    gradients = {name: files[0].get_tensor(name) for name in names if "score " not in name}
    parts = [json.loads(file.metadata()["metrics"]) for file in files]
    metrics = merge_metrics([{name: Metric(*part[name]) for name in part} for part in parts])
    return (
        scores,
        gradients,
        metric_values(metrics),
        json.loads(files[0].metadata()["communication"]),
    )


@pytest.fixture(scope="module", params=MODELS)
def padded_reference(request, folder):
    """Model, loss, gradients and scores by column of transformers' own padded pass; Llama's in
    float64."""
    rows = dict(padded(make_batch(ROWS)).batch.items())
    if request.param == "llama":
        hf = AutoModelForCausalLM.from_pretrained(
            folder / request.param, attn_implementation="sdpa"
        ).double()
        rows = {
            name: rows[name].double() if rows[name].is_floating_point() else rows[name]
            for name in rows
        }
    else:  # only eager bounds attention logits, and its softmax is in float32
        hf = AutoModelForCausalLM.from_pretrained(
            folder / request.param, attn_implementation="eager"
        )
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
    responses = rows["response_mask"].size(1)
    log_probs_BRV = torch.log_softmax(hf(**inputs).logits[:, -responses - 1 : -1] / 0.7, dim=-1)
    log_prob = log_probs_BRV.gather(-1, rows["input_ids"][:, -responses:, None])[..., 0]
    entropy = -(log_probs_BRV.exp() * log_probs_BRV).sum(-1)
    ratio, advantage = (log_prob - rows["old_log_probs"]).exp(), rows["advantages"]
    surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    surrogate = torch.where(advantage < 0, torch.minimum(surrogate, -3 * advantage), surrogate)
    kl = ((rows["ref_log_prob"] - log_prob).exp() - (rows["ref_log_prob"] - log_prob) - 1).clamp(
        -10, 10
    )
    mask = rows["response_mask"]
    loss = ((surrogate - 0.01 * entropy + 0.1 * kl) * mask).sum() / mask.sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    scores = {
        "old_log_probs": log_prob,
        "entropys": entropy,
        "sum_pi_squared": log_probs_BRV.exp().square().sum(-1),
    }
    return (
        request.param,
        loss.item(),
        gradients,
        {name: (score * mask).detach() for name, score in scores.items()},
    )


def test_every_layout_of_the_actor_has_loss_gradient_and_scores_of_a_padded_pass(
    folder, padded_reference
):
    model, loss, gradients, expected_scores = padded_reference
    layouts = [(ranks, layout) for ranks in ACTORS for layout in actors(ranks, folder)]
    for ranks, layout in layouts:
        if model_of(layout) != model or "bfloat16" in layout:
            continue
        scores, got, metrics, _ = collected(folder, "actor", ranks, layout)
        # The terms of the loss are of the size of 1.
        assert metrics["actor/loss"] == pytest.approx(loss, rel=0, abs=1e-6), (ranks, layout)
        # The reference of gpt-oss is in float32, from which one rank differs by 2.8e-6 too.
        largest = 4e-6 if model_of(layout) == "gpt_oss" else 1e-6
        assert relative_error(got, gradients) < largest, (ranks, layout)
        assert scores.keys() == expected_scores.keys()
        for name, expected in expected_scores.items():
            torch.testing.assert_close(scores[name], expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_every_layout_reports_the_same_metrics(folder, role):
    _, _, expected, _ = collected(folder, role, 1, "all rows")
    layouts = CRITICS
    if role == "actor":
        layouts = {ranks: actors(ranks, folder) for ranks in ACTORS}
    for ranks, layout in ((number, layout) for number in layouts for layout in layouts[number]):
        if model_of(layout) != "llama" or layout.startswith("bfloat16"):
            continue
        _, _, metrics, _ = collected(folder, role, ranks, layout)
        assert metrics.keys() == expected.keys()
        for name in [name for name in expected if "perf/" not in name]:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), (
                ranks,
                layout,
                name,
            )


def test_every_layout_of_the_critic_has_the_same_gradient_and_values(folder):
    expected_scores, expected, _, _ = collected(folder, "critic", 1, "all rows")
    for layout in CRITICS[4]:
        scores, gradients, _, _ = collected(folder, "critic", 4, layout)
        assert relative_error(gradients, expected) < 1e-6, layout
        torch.testing.assert_close(scores["values"], expected_scores["values"], rtol=0, atol=1e-5)


def loss_of_samples(hf, data, loss_mode):
    """The actor's objective by the book, row by row without padding: the mean over the samples with
    scored tokens of the mean over the tokens of all their rows."""
    rows, means = padded(data).batch, []
    for sample in sorted(set(SAMPLE_IDS)):
        terms = []
        for row in (rows["sample_id"] == sample).nonzero().flatten().tolist():
            tokens = rows["input_ids"][row][rows["attention_mask"][row].bool()][None]
            count = int(rows["attention_mask"][row, PROMPT:].sum())
            log_probs_all = torch.log_softmax(hf(tokens).logits[0, -count - 1 : -1] / 0.7, dim=-1)
            log_prob = log_probs_all.gather(-1, tokens[0, -count:, None])[:, 0]
            entropy = -(log_probs_all.exp() * log_probs_all).sum(-1)
            given = [
                rows[name][row, :count].double()
                for name in ("old_log_probs", "ref_log_prob", "advantages")
            ]
            is_scored = rows["response_mask"][row, :count].bool()
            terms.append([column[is_scored] for column in (log_prob, entropy, *given)])
        log_prob, entropy, old, ref, advantage = map(torch.cat, zip(*terms, strict=True))
        if not len(log_prob):
            continue
        if loss_mode == "gspo":  # the geometric mean of the ratios of the whole sample
            ratio = (log_prob - log_prob.detach() + (log_prob - old).detach().mean()).exp()
        else:
            ratio = (log_prob - old).exp()
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        if loss_mode == "vanilla":
            surrogate = torch.where(
                advantage < 0, torch.minimum(surrogate, -3 * advantage), surrogate
            )
        kl = ((ref - log_prob).exp() - (ref - log_prob) - 1).clamp(-10, 10)
        means.append((surrogate - 0.01 * entropy + 0.1 * kl).mean())
    return torch.stack(means).mean()


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
def test_the_tokens_of_all_rows_of_a_sample_are_one_sequence_of_the_loss(folder, loss_mode):
    data = samples_of_one_or_two_rows()
    hf = AutoModelForCausalLM.from_pretrained(folder / "llama", attn_implementation="sdpa").double()
    loss = loss_of_samples(hf, data, loss_mode)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for ranks, layout in (
        (number, layout) for number in SAMPLES for layout in SAMPLES[number] if loss_mode in layout
    ):
        _, gradients, metrics, _ = collected(folder, "samples", ranks, layout)
        assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=0, abs=1e-6), (ranks, layout)
        # The reference is in float64; in float32 processors differ from it by 0.6e-6 to 1.1e-6.
        assert relative_error(gradients, expected) < 2e-6, (ranks, layout)
    # Where each row is a sample, the gradient is another one.
    worker = make_actor(folder, "llama", **SAMPLES[1][f"{loss_mode}, all samples"])
    worker.init_model()
    each_row = data.select(batch_keys=sorted(data.tensors().keys() - {"sample_id"}))
    gradients, _ = gradients_of(worker, lambda: worker.update_actor(each_row))
    assert relative_error(gradients, expected) > 0.1


@pytest.mark.parametrize("passes", [{"micro": 2}, {**BUDGET, "ppo_max_token_len_per_gpu": 22}])
def test_mini_batches_are_of_samples_none_of_which_is_divided(folder, passes):
    config = policy_config(
        str(folder / "llama"), prompts=4, ppo_epochs=2, **{**OBJECTIVE, **passes}
    )
    group = local_group(ActorWorker, config)
    engine, steps = group.workers[0].engine, [[]]
    pack, take_step = engine.pack, engine.step
    engine.pack = lambda rows: steps[-1].append(rows["sample_id"].tolist()) or pack(rows)
    engine.step = lambda: steps.append([]) or take_step()
    group.update_actor(samples_of_one_or_two_rows()).get()
    assert steps.pop() == []
    # Four samples a step are three steps for ten of them, in each epoch: as equal as can be.
    of_steps = [sorted(number for of_pass in of_step for number in of_pass) for of_step in steps]
    assert of_steps == [[0, 0, 1, 2, 2, 3], [4, 4, 5, 5, 6], [7, 7, 8, 9, 9]] * 2
    for of_pass in (of_pass for of_step in steps for of_pass in of_step):
        assert all(of_pass.count(number) == SAMPLE_IDS.count(number) for number in of_pass)
        if "micro" in passes:
            assert 1 <= len(set(of_pass)) <= 2
    assert any(len(set(of_pass)) > 1 for of_step in steps for of_pass in of_step)


def test_gradients_travel_once_a_step_where_they_may_stay_whole_and_else_in_each_micro_batch(
    folder,
):
    def communication(layout):
        return Counter(collected(folder, "actor", 4, layout)[3])

    units = 3  # two layers and the rest
    once, many, whole = map(communication, ("sharded", "1 row", "whole, 1 row"))
    assert once["_reduce_scatter_base_"] == whole["_reduce_scatter_base_"] == units
    assert many["_reduce_scatter_base_"] == 4 * units  # in each of the 4 micro-batches
    assert many["_allgather_base_"] == 4 * once["_allgather_base_"]
    assert whole["_allgather_base_"] == units
    # Copies gather nothing; their gradients are added, like the counts of the mini-batch and the
    # squared norm. Before, the ranks agree on the numbers of mini-batches and of passes.
    assert (
        communication("replicated")
        == communication("replicated, 1 row")
        == {"allreduce_": units + 4}
    )
    assert communication("two copies, 1 row")["_reduce_scatter_base_"] == 4 * units
    assert communication("two copies, 1 row")["allreduce_"] == units + 4


def test_micro_batches_are_added_in_float32_where_parameters_are_stored_in_bfloat16(folder):
    (_, once, _, _), (_, many, _, _) = (
        collected(folder, "actor", 2, name) for name in ("bfloat16", "bfloat16, 1 row")
    )
    # One rounding of the sum to bfloat16 differs where the two sums lie on both sides of a
    # boundary; a rounding of each of the 8 micro-batches would differ nearly everywhere, by about
    # 2**-9.
    assert relative_error(many, once) < 2e-4


def test_ranks_or_heads_that_do_not_divide_into_groups_are_refused(folder, monkeypatch):
    worker = make_actor(folder, "llama", ulysses_sequence_parallel_size=2)
    with pytest.raises(
        ValueError, match="ulysses_sequence_parallel_size=2 does not divide the 1 ranks of the pool"
    ):
        worker.init_model()
    with pytest.raises(
        ValueError, match="ulysses_sequence_parallel_size=3 does not divide the 4 attention heads"
    ):
        require_shares_of_heads(MODELS["llama"], 3, key="ulysses_sequence_parallel_size")
