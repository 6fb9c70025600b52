"""Fine-tunes a language model on conversations:
`python -m verl_like.trainer.main_sft key=value ...`.

The configuration is checked before torch or Ray are imported. A wrong one ends the process with
exit code 2 and the reason.
"""

from verl_like.trainer.config.supervised import SFTConfig, broken_supervised_rules
from verl_like.trainer.run.entry_point import entry_point

USAGE = """The run is described by overrides of the form key=value, e.g. data.train_files=rows.jsonl
model.path=folder trainer.device=cpu; --print-config shows all keys."""
WORKERS = ["verl_like.workers.supervised"]

if __name__ == "__main__":
    with entry_point(SFTConfig, broken_supervised_rules, "main_sft", USAGE, WORKERS) as (
        config,
        template,
    ):
        # torch, Ray and vLLM load only for a configuration that can run.
        from verl_like.trainer.supervised.run_supervised import run_supervised

        raise SystemExit(run_supervised(config, template))
