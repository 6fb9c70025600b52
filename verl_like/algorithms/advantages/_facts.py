"""The facts of the estimators here, which their signatures and decorators say too.

The configuration is checked with them, without torch.
"""

from verl_like.algorithms.registry import AlgorithmFacts

_REWARDS = frozenset({"token_level_rewards", "response_mask"})
_GROUPS = _REWARDS | {"index"}
_OPTIMAL_BASELINE = _GROUPS | {"old_log_probs", "sum_pi_squared"}

FACTS = {
    "dr_grpo": AlgorithmFacts(_GROUPS),
    "gae": AlgorithmFacts(_REWARDS | {"values", "gamma", "lam"}, over_batch=True),
    "gdpo": AlgorithmFacts(
        frozenset({"scores_by_reward", "response_mask", "index"}), over_batch=True
    ),
    "gpg": AlgorithmFacts(_GROUPS, over_batch=True),
    "grpo": AlgorithmFacts(_GROUPS),
    "grpo_passk": AlgorithmFacts(_GROUPS),
    "max_rl": AlgorithmFacts(_GROUPS),
    "opo": AlgorithmFacts(_GROUPS),
    "optimal_token_baseline": AlgorithmFacts(_OPTIMAL_BASELINE, by_position=True),
    "reinforce_plus_plus": AlgorithmFacts(_REWARDS, over_batch=True),
    "reinforce_plus_plus_baseline": AlgorithmFacts(_GROUPS, over_batch=True),
    "remax": AlgorithmFacts(_REWARDS | {"reward_baselines"}),
    "rloo": AlgorithmFacts(_GROUPS),
    "tir_optimal_token_baseline": AlgorithmFacts(_OPTIMAL_BASELINE),
}
