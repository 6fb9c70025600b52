"""The one table of PPO columns: what each is called, its shape and dtype, who writes it and what it
means."""

from dataclasses import dataclass
from typing import Literal

PAD_COLUMN = "is_pad"


@dataclass(frozen=True)
class Column:
    """One column of the batch. `dims` names the axes: B rows, P prompt, R response, T = P + R, L
    layers with a router, k experts of a token; "-" for meta entries.

    Columns with P or R are jagged: a row has as many entries as its prompt or its response has
    tokens. P, R and T are the widths where columns are padded.
    """

    name: str
    dims: str
    dtype: str
    writer: str
    meaning: str
    kind: Literal["tensor", "non_tensor", "meta"] = "tensor"


_TABLE = [
    Column("prompts", "B P", "int64", "prompt dataset", "Prompt token ids; padded on the left."),
    Column(
        "responses",
        "B R",
        "int64",
        "generate_sequences",
        "Response token ids as sampled; padded on the right.",
    ),
    Column(
        "response_mask",
        "B R",
        "int64",
        "generate_sequences",
        "1 on tokens that the policy drew, the end-of-sequence token included; 0 on others and on "
        "padding.",
    ),
    Column(
        "sample_id",
        "B",
        "int64",
        "whoever makes samples of several rows",
        "Number of the sample, of a batch's rows that follow each other. Without it each row is a "
        "sample.",
    ),
    Column(
        "input_ids",
        "B T",
        "int64",
        "padding, for methods without jagged=True",
        "Token ids: prompt padded on the left, then response padded on the right; before "
        "generation the prompt.",
    ),
    Column(
        "attention_mask",
        "B T",
        "int64",
        "padding, for methods without jagged=True",
        "1 on real tokens, 0 on padding.",
    ),
    Column(
        "position_ids",
        "B T",
        "int64",
        "padding, for methods without jagged=True",
        "Position of each token in its sequence, 0 on the first real token.",
    ),
    Column(
        "rollout_log_probs",
        "B R",
        "float32",
        "generate_sequences",
        "Log-probability of each response token under the rollout engine that sampled it.",
    ),
    Column(
        "routed_experts",
        "B T L k",
        "int8 or int16",
        "generate_sequences with router_replay.mode=R3, compute_log_prob with R2",
        "Of each token of prompt and response the k experts that computed it, in each of the L "
        "layers with a router; -1 in all of them for a token without a record, for which the model "
        "routes itself. int16 with more than 128 experts.",
    ),
    Column(
        "old_log_probs",
        "B R",
        "float32",
        "compute_log_prob",
        "Log-probability of each response token under the actor before the update.",
    ),
    Column(
        "unreplayed_log_probs",
        "B R",
        "float32",
        "compute_log_prob, with router_replay.mode=R3",
        "old_log_probs without router replay, of every 16th row of a rank; NaN on other rows.",
    ),
    Column(
        "entropys",
        "B R",
        "float32",
        "compute_log_prob",
        "Entropy of the actor's next-token distribution at each response token, in nats.",
    ),
    Column(
        "sum_pi_squared",
        "B R",
        "float32",
        "compute_log_prob, for the estimator",
        "Sum over the vocabulary of the actor's squared probabilities at each response token.",
    ),
    Column(
        "ref_log_prob",
        "B R",
        "float32",
        "compute_ref_log_prob",
        "Log-probability of each response token under the frozen reference model.",
    ),
    Column(
        "values",
        "B R",
        "float32",
        "compute_values",
        "The critic's estimate of the return from each response token.",
    ),
    Column(
        "rule_scores",
        "B R",
        "float32",
        "driver, from the reward function",
        "Score of the rule reward, placed on the last response token.",
    ),
    Column(
        "episode_scores",
        "B R",
        "float32",
        "run_episodes",
        "Rewards of an episode, each on the last drawn token of a call of the model.",
    ),
    Column(
        "is_failed",
        "B",
        "bool",
        "run_episodes",
        "True on the row that stands for an episode that failed; none of its tokens is trained.",
    ),
    Column(
        "is_left_out",
        "B",
        "bool",
        "run_episodes, as is_skipped",
        "True on rows of episodes that the agents leave out, where rules score the others.",
    ),
    Column(
        "is_skipped",
        "B",
        "bool",
        "driver, from the reward function",
        "True on rows that could not be scored; they count in no loss.",
    ),
    Column(
        "rm_scores",
        "B R",
        "float32",
        "compute_rm_score",
        "Score of the reward model, placed on the last response token; that of a further one is "
        "rm_scores/<name>.",
    ),
    Column(
        "token_level_scores",
        "B R",
        "float32",
        "driver",
        "Sum of the scores, before any KL penalty.",
    ),
    Column(
        "token_level_rewards",
        "B R",
        "float32",
        "driver",
        "token_level_scores minus the KL penalty where the KL is in the reward.",
    ),
    Column(
        "reward_baselines",
        "B",
        "float32",
        "driver, from a greedy response",
        "Reward of a greedy response to the row's prompt, NaN where it was skipped; where the "
        "estimator needs it.",
    ),
    Column(
        "advantages",
        "B R",
        "float32",
        "driver, by the advantage estimator",
        "How much better than expected each response token was.",
    ),
    Column(
        "rollout_is_weights",
        "B R",
        "float32",
        "driver, by rollout_is",
        "Importance weight of each response token, by which its loss is multiplied.",
    ),
    Column(
        "sampled_mask",
        "B R",
        "int64",
        "driver, by rollout_rs",
        "response_mask before tokens or responses were rejected.",
    ),
    Column(
        "selected_tokens",
        "B R",
        "bool",
        "driver, by the policy loss",
        "True on tokens that the policy loss picked from the whole batch.",
    ),
    Column(
        "teacher_log_prob",
        "B R",
        "float32",
        "compute_teacher_log_prob, or a custom role",
        "Log-probability of each response token under a teacher, for the policy loss distillation.",
    ),
    Column(
        "returns",
        "B R",
        "float32",
        "driver, by the advantage estimator",
        "Target of the value loss.",
    ),
    Column(
        "mini_batch",
        "B",
        "int64",
        "driver, by the learner",
        "Number of the optimizer step in which the row is trained in each epoch, from 0.",
    ),
    Column(
        PAD_COLUMN,
        "B",
        "bool",
        "pad_dataproto_to_divisor",
        "True on rows that only fill up a batch; they count in no loss and no metric.",
    ),
    Column(
        "uid",
        "B",
        "object (str)",
        "prompt dataset",
        'Prompt id "epoch-index", shared by all samples of one prompt.',
        kind="non_tensor",
    ),
    Column(
        "data_source",
        "B",
        "object (str)",
        "prompt dataset",
        "Name of the data set; selects the reward function.",
        kind="non_tensor",
    ),
    Column(
        "reward_model",
        "B",
        "object (dict)",
        "prompt dataset",
        'What the reward function compares with, e.g. {"style": "rule", "ground_truth": "72"}.',
        kind="non_tensor",
    ),
    Column(
        "extra_info",
        "B",
        "object (dict)",
        "prompt dataset",
        "Anything else the data set passes to the reward function.",
        kind="non_tensor",
    ),
    Column(
        "policy_version",
        "B",
        "object (tuple)",
        "generate_sequences",
        "Of each response the spans (version, start, end) of its tokens: version counts the "
        "training steps of the weights that sampled tokens start to end - 1. One span, or with "
        "detached.update_in_flight several.",
        kind="non_tensor",
    ),
    Column(
        "raw_prompt",
        "B",
        "object (list)",
        "prompt dataset",
        "The prompt as chat messages.",
        kind="non_tensor",
    ),
    Column(
        "padding",
        "-",
        "tuple[int, int, int]",
        "prompt dataset",
        "(P, R, the token that fills them): how wide columns are where they are padded.",
        kind="meta",
    ),
    Column(
        "global_steps",
        "-",
        "int",
        "driver",
        "Number of the training step, from 1; 0 in the validation before the first.",
        kind="meta",
    ),
    Column(
        "validate",
        "-",
        "bool",
        "driver",
        "True when the rollout uses the validation sampling settings.",
        kind="meta",
    ),
    Column(
        "greedy",
        "-",
        "bool",
        "driver",
        "True when the rollout draws one response greedily.",
        kind="meta",
    ),
    Column(
        "part_of_step",
        "-",
        "tuple[int, int]",
        "driver",
        "(i, k): the i-th of k equal parts of a step.",
        kind="meta",
    ),
    Column(
        "metrics",
        "-",
        "dict[str, Metric]",
        "any worker method",
        "Metrics of the call; merged over ranks by each metric's own reduction.",
        kind="meta",
    ),
    Column(
        "timing",
        "-",
        "dict[str, float]",
        "any worker method",
        "Seconds by name; concatenating the ranks' results turns each into a list.",
        kind="meta",
    ),
]

COLUMNS = {column.name: column for column in _TABLE}
assert len(COLUMNS) == len(_TABLE), "a column is in the table twice"
