"""verl_like's side of `training_on_examples`: its trainer and its worker in this process, one step
at a time."""

from typing import Any

from benchmarks.serve import serve, stopwatch
from verl_like.protocol import metric_values
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.supervised import (
    DPOConfig,
    RMConfig,
    SFTConfig,
    broken_supervised_rules,
)
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.supervised.run_supervised import KINDS, check_inputs, worker_arguments
from verl_like.trainer.supervised.trainer import SupervisedTrainer

SCHEMAS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig}
trainers: list[SupervisedTrainer] = []


def start(kind: str, overrides: list[str]) -> dict[str, Any]:
    """Loads data and model."""
    inputs = check_inputs(load_config(SCHEMAS[kind], broken_supervised_rules, overrides), None)
    config = inputs.config
    kind_of_run = KINDS[SCHEMAS[kind]]
    group = LocalWorkerGroup(
        RayClassWithInitArgs(kind_of_run.worker, *worker_arguments(config)), 1, role="model"
    )
    recorder = RunRecorder(config, kind_of_run.display)
    trainers[:] = [SupervisedTrainer(config, inputs.train_dataset, None, group, recorder)]
    trainers[0].init_workers()
    return {}


def sum_of_losses() -> dict[str, Any]:
    """-log p of all learned tokens of all rows, under the present model."""
    data = trainers[0].train_dataset.collate(range(len(trainers[0].train_dataset)))
    mean = metric_values(trainers[0].group.evaluate(data).get().meta_info["metrics"])["loss"]
    return {"sum": mean * data.tensors()["response_mask"].values().sum().item()}


def step() -> dict[str, Any]:
    """One step: its seconds, tokens without padding, and loss."""
    trainer = trainers[0]
    trainer.global_step += 1
    total = trainer.config.num_steps_of_run
    with stopwatch() as seconds, trainer.recorder.step(trainer.global_step, total) as log:
        metrics = metric_values(trainer.step())
        log(metrics)
    (loss,) = (value for name, value in metrics.items() if name.endswith("/loss"))
    return {"seconds": seconds[0], "tokens": metrics["perf/total_num_tokens"], "loss": loss}


if __name__ == "__main__":
    serve(start, sum_of_losses, step)
