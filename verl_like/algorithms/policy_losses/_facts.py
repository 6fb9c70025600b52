"""The facts of the losses here, which their signatures say too.

The configuration is checked with them, without torch.
"""

from verl_like.algorithms.registry import AlgorithmFacts

_INPUTS = frozenset({"old_log_prob", "log_prob", "advantages", "response_mask", "counts"})
_OF_RESPONSES = "seq-mean-token-mean"

FACTS = {
    "cispo": AlgorithmFacts(_INPUTS),
    "clip_cov": AlgorithmFacts(_INPUTS | {"selected_tokens"}),
    "distillation": AlgorithmFacts(_INPUTS | {"teacher_log_prob"}),
    "dppo_kl": AlgorithmFacts(_INPUTS),
    "dppo_tv": AlgorithmFacts(_INPUTS),
    "dro": AlgorithmFacts(_INPUTS),
    "geo_mean": AlgorithmFacts(_INPUTS, loss_agg_mode=_OF_RESPONSES),
    "gpg": AlgorithmFacts(_INPUTS),
    "gspo": AlgorithmFacts(_INPUTS, loss_agg_mode=_OF_RESPONSES),
    "kl_cov": AlgorithmFacts(_INPUTS | {"selected_tokens"}),
    "reinforce": AlgorithmFacts(_INPUTS),
    "sapo": AlgorithmFacts(_INPUTS, loss_agg_mode=_OF_RESPONSES),
    "vanilla": AlgorithmFacts(_INPUTS),
}
