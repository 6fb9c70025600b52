"""Compares what the rollout engines compute with what the actor computes, when a run starts.

An engine that has the actor's weights may still build another model with them. If it is not known
how an engine keeps a weight, this is done after each update, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_like.data.prompt_dataset import PromptDataset
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_parts
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.run.errors import EngineMismatch

NUM_PROMPTS = 4
NUM_TOKENS = 8
"""How many tokens each response has."""
LARGEST_IN_FLOAT32 = 1e-3
"""The largest difference of log-probabilities that is allowed if both sides compute in float32."""
MEAN_OTHERWISE = 0.05
"""The mean difference that is allowed if a side computes in bfloat16 or float16."""
MEAN_IF_QUANTISED = 0.2
"""The mean difference that is allowed if the engine's weights are quantised."""


UNKNOWN_ACTOR = "The actor has no score_greedy, so the engine is not compared with it."
UNKNOWN_ROLLOUT = (
    "The rollout worker has no draw_greedily, so its engine is not compared with the actor."
)


def unknown_parameters(rollout: WorkerGroup) -> tuple[str, ...]:
    """Returns the engine's parameters whose layout is not known, which are the same in all
    replicas. There are none for a custom rollout worker that does not say it."""
    if not hasattr(rollout, "unknown_parameters"):
        return ()
    of_ranks = rollout.unknown_parameters()
    return tuple(of_ranks[0])


def by_numbers(names: tuple[str, ...]) -> str:
    """Returns what the start of a run says of these parameters."""
    return (
        f"Arrival shown by numbers: it is not known how vLLM keeps {', '.join(names)}, so after "
        "each update the engines' log-probabilities are compared with the actor's."
    )


def draw(
    rollout: WorkerGroup, dataset: PromptDataset, numbers: Sequence[int] | None = None
) -> list[DataProto]:
    """Has each replica answer prompts greedily, without random numbers. Returns (B, ...) rows with
    `rollout_log_probs` for each replica.

    `numbers` are those of the prompts in the data set, the first `NUM_PROMPTS` if it is None. The
    list is empty for a custom rollout worker that has no `draw_greedily`.
    """
    if not hasattr(rollout, "draw_greedily"):
        return []
    if numbers is None:
        numbers = range(min(NUM_PROMPTS, len(dataset)))
    rows = [dataset[index] for index in numbers]
    prompts = dataset.collate(rows, epoch=0)
    answers = rollout.draw_greedily(prompts, NUM_TOKENS)
    return [answer for answer in answers if answer is not None]


def log_probs_of(actor: WorkerGroup, drawn: list[DataProto]) -> list[Tensor]:
    """Returns the log-probabilities that the actor, or a copy of it, computes for the tokens that
    the replicas drew. There is a tensor for each replica, float32 at temperature 1."""
    return [of_tokens(scored, "old_log_probs") for scored in score(actor, drawn)]


def score(actor: WorkerGroup, drawn: list[DataProto], **options: bool) -> list[DataProto]:
    """Returns what the actor's `score_greedy` computes for the rows of each replica."""
    if not drawn:
        return []
    parts = [each.select(meta_info_keys=[]) for each in drawn]
    batch = DataProto.concat(parts)
    scored = actor.score_greedy(batch, **options).get()
    return scored.chunk(len(parts))  # each replica has answered the same prompts


def of_tokens(batch: DataProto, name: str) -> Tensor:
    """Returns the values of a column for all response tokens of a batch, in one tensor
    (tokens,)."""
    values, _offsets = jagged_parts(batch.tensors()[name])
    return values


def require_one_model(
    config: PPOConfig, side: str, drawn: list[DataProto], log_probs: list[Tensor]
) -> None:
    """Raises EngineMismatch unless each replica's log-probabilities are the actor's `log_probs`, up
    to rounding. `side` says in the message whose engine it is."""
    quantization = config.actor_rollout_ref.rollout.quantization
    pairs = zip(drawn, log_probs, strict=True)
    for replica, (batch, of_actor) in enumerate(pairs):
        own = of_tokens(batch, "rollout_log_probs")
        what = f"rollout replica {replica}{side}"
        # A mean over many prompts would hide that the tokens of one are wrong.
        num_parts = max(1, len(batch) // NUM_PROMPTS)
        parts = zip(own.tensor_split(num_parts), of_actor.tensor_split(num_parts), strict=True)
        for own_part, part_of_actor in parts:
            require_close(config, what, own_part, part_of_actor, quantization)


def require_close(
    config: PPOConfig, what: str, own: Tensor, of_actor: Tensor, quantization: str | None = None
) -> None:
    """Raises EngineMismatch unless the log-probabilities `own` of `what` are the actor's, up to the
    rounding of the data types. NaN is a mismatch."""
    policy = config.actor_rollout_ref
    actor_dtype = policy.actor.fsdp_config.dtype
    dtypes = {policy.rollout.dtype, actor_dtype}
    differences = (own - of_actor).abs()
    if dtypes == {"float32"} and not quantization:
        kind = "largest"
        value = differences.max().item()
        limit = LARGEST_IN_FLOAT32
    else:
        kind = "mean"
        value = differences.mean().item()
        limit = MEAN_IF_QUANTISED if quantization else MEAN_OTHERWISE
    if value <= limit:  # not so for NaN
        return
    with_nan_as_inf = differences.nan_to_num(torch.inf)
    worst = int(with_nan_as_inf.argmax())
    raise EngineMismatch(
        f"{what} does not compute the actor's model, though its weights are the actor's: of "
        f"{len(own)} tokens drawn greedily the {kind} difference of "
        f"log-probabilities is {value:.3g}, and at most {limit:g} is rounding "
        f"({policy.rollout.name} computes in {quantization or policy.rollout.dtype}, the actor in "
        f"{actor_dtype}). Where they differ most it has {own[worst]:.6f} and "
        f"the actor {of_actor[worst]:.6f}. Compare how both read {policy.model.path}/config.json, "
        "such as rope and norms, or set actor_rollout_ref.rollout.name=hf."
    )
