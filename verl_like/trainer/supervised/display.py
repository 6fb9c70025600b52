"""Describes what the record of training on examples shows."""

from verl_like.trainer.run.display import Display


def display_of(prefix: str, unit: str) -> Display:
    """Describes what is shown of a run whose metrics begin with `prefix`. `unit` is the unit of the
    loss."""
    rewards = (f"{prefix}/chosen_reward", f"{prefix}/rejected_reward", f"{prefix}/margin")
    terms = tuple(f"{prefix}/{name}_loss" for name in ("td", "value", "cql", "lm"))
    return Display(
        step_line=(
            ("loss", (f"{prefix}/loss",), "{:.4f}"),
            ("acc", (f"{prefix}/accuracy",), "{:.3f}"),
            ("lr", (f"{prefix}/lr",), "{:.1e}"),
            ("grad", (f"{prefix}/grad_norm",), "{:.2f}"),
            ("tok/s", ("perf/total_throughput",), "{:,.0f}"),
        ),
        phases=("update_model", "testing", "save_checkpoint"),
        stages=(("update_model",), ()),
        charts=(
            ("Validation", ("val-core/",), ""),
            ("Loss", (f"{prefix}/loss",), unit),
            ("Rewards", rewards, ""),
            ("Terms of the loss", terms, unit),
            ("Q and V", (f"{prefix}/target_q", f"{prefix}/value"), "score"),
            ("Accuracy", (f"{prefix}/accuracy", f"{prefix}/confidence"), "share"),
            ("Gradient norm", (f"{prefix}/grad_norm",), ""),
            ("Seconds a step", ("timing_s/step",), "s"),
        ),
    )


SFT_DISPLAY = display_of("sft", "nats per learned token")
RM_DISPLAY = display_of("rm", "nats per pair")
DPO_DISPLAY = display_of("dpo", "per pair")
ILQL_DISPLAY = display_of("ilql", "per learned token")
