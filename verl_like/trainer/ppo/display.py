"""What a run of PPO shows of its metrics, its calls and its generations."""

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_like.protocol import DataProto
from verl_like.trainer.config.roles import Role
from verl_like.trainer.run.display import Display
from verl_like.trainer.run.episodes import FAILURES

PPO_DISPLAY = Display(
    step_line=(
        ("reward", ("critic/score/mean",), "{:.3f}"),
        ("KL", ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"), "{:.4f}"),
        ("entropy", ("actor/entropy",), "{:.3f}"),
        ("length", ("response_length/mean",), "{:.1f}"),
        ("drift", ("training/rollout_probs_diff_mean",), "{:.1e}"),
        ("tok/s", ("perf/total_throughput",), "{:,.0f}"),
        ("overlap", ("perf/overlap",), "{:.0%}"),
    ),
    phases=(
        "gen",
        "reward",
        "old_log_prob",
        "ref",
        "teacher",
        "values",
        "adv",
        "reward_model",
        "annotate",
        "update_critic",
        "update_actor",
        "update_weights",
        "testing",
        "save_checkpoint",
    ),
    # verl's timer names.
    phase_of_method={
        "generate_sequences": "gen",
        "run_episodes": "gen",
        "compute_log_prob": "old_log_prob",
        "compute_ref_log_prob": "ref",
        "compute_teacher_log_prob": "teacher",
        "compute_values": "values",
        "compute_rm_score": "reward_model",
        "score": "reward",
    },
    stages=(
        ("generate_sequences", "run_episodes"),
        ("sleep",),
        (),  # inference
        ("update_critic", "update_actor"),
        ("export_weights",),
        ("load_weights",),
    ),
    process_of_role={Role.Rollout: "rollout", "rules": "reward"},
    charts=(
        ("Validation", ("val-core/",), "score"),
        ("Reward", ("critic/score/mean", "critic/rewards/mean"), "mean per sample"),
        (
            "Rewards by name",
            ("reward/rule_scores/", "reward/rm_scores/", "reward/acc/"),
            "mean per sample",
        ),
        ("KL", ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"), "nats per token"),
        ("Response length", ("response_length/mean", "response_length/max"), "tokens"),
        ("Entropy", ("actor/entropy",), "nats per token"),
        (
            "Log-prob drift, engine against trainer",
            ("training/rollout_probs_diff_mean",),
            "mean |p - q|",
        ),
        ("Gradient norm", ("actor/grad_norm", "critic/grad_norm"), ""),
        ("Turns and tool calls", ("agent/calls/mean", "agent/tool_calls/mean"), "mean per episode"),
        (
            "Turns by their row",
            ("agent/num_joined_calls", "agent/num_drifted_calls"),
            "calls of the model",
        ),
        *FAILURES,
        ("Seconds a step", ("timing_s/step",), "s"),
        ("Critical path / time of a step", ("perf/overlap",), ""),
    ),
    histograms=(
        ("Staleness of the responses", "training/staleness/share_", "training steps"),
        ("Effective sample size", "actor/eff_sample_size", "share of the tokens of a step"),
        (
            "Drift of the policy from the engine",
            "actor/rollout_kl",
            "nats per token, mean of a step",
        ),
    ),
)


def generation_of_row(
    row: int, batch: DataProto, scores_B: Tensor, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Returns what is shown of a row of a validation batch: the last message of its prompt, its
    response, ground truth and score."""
    one = batch.rows(row, row + 1).tensor_batch
    mask = one["response_mask"].values().bool()
    sampled_tokens = one["responses"].values()[mask]
    response = tokenizer.decode(sampled_tokens)
    columns = batch.non_tensor_batch
    last_message = columns["raw_prompt"][row][-1]
    truth = columns["reward_model"][row].get("ground_truth")
    return {
        "prompt": last_message["content"],
        "response": str(response),
        "ground truth": str(truth),
        "score": f"{scores_B[row]:.2f}",
    }
