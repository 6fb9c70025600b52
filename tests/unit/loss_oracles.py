"""Policy losses in float64 NumPy, token by token with branches, and their gradients by hand.

An oracle takes one row: `old`, `new`, `advantages` (R,) and `mask` (R,), and a namespace of
settings. It returns the losses (R,), their derivatives (R, R) with [t, j] = d loss_t / d new_j, and
the metrics by token, (R,) each.
"""

import math
from types import SimpleNamespace

import numpy as np

SETTINGS = SimpleNamespace(
    clip_ratio=0.2,
    clip_ratio_low=0.15,
    clip_ratio_high=0.3,
    clip_ratio_c=2.5,
    tau_pos=1.3,
    tau_neg=0.8,
    dro_beta=0.7,
    ppo_kl_coef=0.6,
    use_task_rewards=True,
    distillation_loss_coef=0.4,
    loss_max_clamp=1.5,
)


def clamped(x):
    return min(max(x, -20.0), 20.0)


def diagonal(row, token_loss):
    """The oracle of a loss whose tokens stand alone: `token_loss(t)` -> (loss, its derivative,
    metrics)."""
    length = len(row.old)
    losses, derivatives, metrics = np.zeros(length), np.zeros((length, length)), {}
    for t in range(length):
        if row.mask[t]:
            losses[t], derivatives[t, t], of_token = token_loss(t)
            for name, value in of_token.items():
                metrics.setdefault(name, np.zeros(length))[t] = value
    return losses, derivatives, metrics


def clipped_surrogate(d, advantage, settings):
    """PPO: (loss, derivative, whether the range raised the loss, whether the dual clip bounded
    it)."""
    ratio, moves = math.exp(clamped(d)), -20 < d < 20
    if advantage >= 0:
        if ratio > 1 + settings.clip_ratio_high and advantage > 0:
            return -advantage * (1 + settings.clip_ratio_high), 0.0, True, False
        return -advantage * ratio, -advantage * ratio * moves, False, False
    if ratio < 1 - settings.clip_ratio_low:
        return -advantage * (1 - settings.clip_ratio_low), 0.0, True, False
    if ratio > settings.clip_ratio_c:
        return -advantage * settings.clip_ratio_c, 0.0, False, True
    return -advantage * ratio, -advantage * ratio * moves, False, False


def gspo(row, settings):
    tokens = [t for t in range(len(row.old)) if row.mask[t]]
    mean = sum(row.new[t] - row.old[t] for t in tokens) / max(len(tokens), 1)
    ratio, low, high = (
        math.exp(min(mean, 10.0)),
        1 - settings.clip_ratio_low,
        1 + settings.clip_ratio_high,
    )

    def token_loss(t):
        a = row.advantages[t]
        is_clipped = (a > 0 and ratio > high) or (a < 0 and ratio < low)
        loss = -a * (high if a > 0 else low) if is_clipped else -a * ratio
        derivative = 0.0 if is_clipped or mean > 10 else -a * ratio
        return (
            loss,
            derivative,
            {"actor/pg_clipfrac": is_clipped, "actor/ppo_kl": row.old[t] - row.new[t]},
        )

    return diagonal(row, token_loss)


def cispo(row, settings):
    def token_loss(t):
        d = clamped(row.new[t] - row.old[t])
        weight = min(max(math.exp(d), 1 - settings.clip_ratio_low), 1 + settings.clip_ratio_high)
        factor = -weight * row.advantages[t]
        return (
            factor * row.new[t],
            factor,
            {"actor/pg_clipfrac": weight != math.exp(d), "actor/ppo_kl": -d},
        )

    return diagonal(row, token_loss)


def sapo(row, settings):
    def token_loss(t):
        d, a = row.new[t] - row.old[t], row.advantages[t]
        ratio, tau = math.exp(clamped(d)), settings.tau_pos if a > 0 else settings.tau_neg
        exponent = tau * (ratio - 1)
        gate = 1 / (1 + math.exp(-exponent)) if exponent < 700 else 1.0
        derivative = -a * 4 * gate * (1 - gate) * ratio * (-20 < d < 20)
        return -a * 4 / tau * gate, derivative, {"actor/ppo_kl": -clamped(d)}

    return diagonal(row, token_loss)


def dppo(row, settings, is_far):
    def token_loss(t):
        new, old, a = row.new[t], row.old[t], row.advantages[t]
        d = clamped(new - old)
        threshold = settings.clip_ratio_high if a > 0 else settings.clip_ratio_low
        outwards = math.exp(new) > math.exp(old) if a > 0 else math.exp(new) < math.exp(old)
        left_out = outwards and is_far(math.exp(new), math.exp(old), threshold)
        factor = 0.0 if left_out else -min(math.exp(d), settings.clip_ratio_c) * a
        truncated = not left_out and math.exp(d) > settings.clip_ratio_c
        metrics = {
            "actor/pg_clipfrac": left_out,
            "actor/pg_clipfrac_lower": truncated,
            "actor/ppo_kl": -d,
        }
        return factor * new, factor, metrics

    return diagonal(row, token_loss)


def dppo_tv(row, settings):
    return dppo(row, settings, lambda p, old, threshold: abs(p - old) > threshold)


def dppo_kl(row, settings):
    def is_far(p, old, threshold):
        other = math.log((1 - old + 1e-8) / (1 - p + 1e-8))
        return old * math.log(old / p) + (1 - old) * other > threshold

    return dppo(row, settings, is_far)


def geo_mean(row, settings):
    length, tokens = len(row.old), [t for t in range(len(row.old)) if row.mask[t]]
    losses, derivatives = np.zeros(length), np.zeros((length, length))
    names = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
    metrics = {name: np.zeros(length) for name in names}
    if not tokens:
        return losses, derivatives, metrics
    limited, moves = {}, {}
    for t in tokens:
        d, a = clamped(row.new[t] - row.old[t]), row.advantages[t]
        low, high = -settings.clip_ratio_low, settings.clip_ratio_high
        limited[t] = 0.0 if a == 0 else min(d, high) if a > 0 else max(d, low)
        moves[t] = limited[t] == d and a != 0 and abs(d) < 20
        metrics["actor/pg_clipfrac"][t] = a > 0 and not low <= d <= high
        metrics["actor/pg_clipfrac_lower"][t] = a < 0 and not low <= d <= high
        metrics["actor/ppo_kl"][t] = -d
    ratio = math.exp(sum(limited.values()) / len(tokens))
    loss = -sum(row.advantages[t] for t in tokens) / len(tokens) * ratio
    for t in tokens:
        losses[t] = loss
        for j in tokens:
            derivatives[t, j] = loss * moves[j] / len(tokens)
    return losses, derivatives, metrics


def gpg(row, settings):
    return diagonal(row, lambda t: (-row.advantages[t] * row.new[t], -row.advantages[t], {}))


def reinforce(row, settings):
    losses, derivatives, _ = gpg(row, settings)
    return losses, derivatives, {"actor/ppo_kl": np.where(row.mask, row.old - row.new, 0.0)}


def dro(row, settings):
    def token_loss(t):
        d, a = row.new[t] - row.old[t], row.advantages[t]
        loss = -(a * row.new[t] - settings.dro_beta / 2 * d * d)
        return loss, settings.dro_beta * d - a, {"actor/ppo_kl": -d}

    return diagonal(row, token_loss)


def clip_cov(row, settings):
    def token_loss(t):
        d = row.new[t] - row.old[t]
        no_dual_clip = SimpleNamespace(**{**vars(settings), "clip_ratio_c": math.inf})
        loss, derivative, raised, _ = clipped_surrogate(d, row.advantages[t], no_dual_clip)
        left_out = row.selected[t] and not raised
        metrics = {"actor/pg_clipfrac": left_out, "actor/ppo_kl": -clamped(d)}
        return (0.0, 0.0, metrics) if left_out else (loss, derivative, metrics)

    return diagonal(row, token_loss)


def kl_cov(row, settings):
    def token_loss(t):
        d, a = row.new[t] - row.old[t], row.advantages[t]
        penalty, ratio, moves = (
            settings.ppo_kl_coef * row.selected[t],
            math.exp(clamped(d)),
            -20 < d < 20,
        )
        loss = -a * ratio + penalty * abs(clamped(d))
        return loss, moves * (-a * ratio + penalty * np.sign(d)), {"actor/ppo_kl": abs(clamped(d))}

    return diagonal(row, token_loss)


def distillation(row, settings):
    def token_loss(t):
        d, kl = row.new[t] - row.old[t], row.new[t] - row.teacher[t]
        signal = -min(max(kl, -settings.loss_max_clamp), settings.loss_max_clamp)
        of_teacher = clipped_surrogate(d, signal, settings)
        of_task = clipped_surrogate(d, row.advantages[t], settings)
        coef = settings.distillation_loss_coef
        metrics = {
            "distillation/abs_loss": abs(kl),
            "distillation/kl": kl,
            "actor/ppo_kl": -clamped(d),
        }
        metrics |= {
            "distillation/pg_clipfrac": of_teacher[2],
            "distillation/pg_clipfrac_lower": of_teacher[3],
        }
        metrics |= {"actor/pg_clipfrac": of_task[2], "actor/pg_clipfrac_lower": of_task[3]}
        return coef * of_teacher[0] + of_task[0], coef * of_teacher[1] + of_task[1], metrics

    return diagonal(row, token_loss)


ORACLES = {
    oracle.__name__: oracle
    for oracle in (
        *(
            gspo,
            cispo,
            sapo,
            dppo_tv,
            dppo_kl,
            geo_mean,
            gpg,
            reinforce,
            dro,
            clip_cov,
            kl_cov,
            distillation,
        ),
    )
}


def token_shares(mask, mode, scale):
    """(B, R): by what factor each token's loss enters the loss of the mini-batch."""
    tokens, rows = mask.sum(), mask.any(-1).sum()
    shares = np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        shares[i, t] = {
            "token-mean": 1 / tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / rows,
            "seq-mean-token-sum-norm": 1 / rows / scale,
            "seq-mean-token-mean": 1 / rows / mask[i].sum(),
        }[mode]
    return shares


def mini_batch(oracle, columns, mask, mode, scale, settings=SETTINGS, weights=None):
    """(loss, gradient (B, R), metrics by token (B, R)) of a whole mini-batch."""
    gradient, loss, metrics = np.zeros(mask.shape), 0.0, {}
    shares = token_shares(mask, mode, scale)
    for i in range(len(mask)):
        row = SimpleNamespace(mask=mask[i], **{name: column[i] for name, column in columns.items()})
        losses, derivatives, of_row = oracle(row, settings)
        factors = shares[i] if weights is None else shares[i] * weights[i]
        if oracle is geo_mean and weights is not None:
            logs = [math.log(weights[i, t] + 1e-10) for t in range(len(row.old)) if row.mask[t]]
            factors = shares[i] * math.exp(sum(logs) / max(len(logs), 1))
        loss += (factors * losses)[mask[i]].sum()
        gradient[i] = np.where(mask[i], factors, 0.0) @ derivatives
        for name, values in of_row.items():
            metrics.setdefault(name, np.zeros(mask.shape))[i] = values
    return loss, gradient, metrics
