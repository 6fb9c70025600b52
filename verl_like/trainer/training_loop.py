"""The loop of every trainer: steps, validations and checkpoints, and an end by SIGTERM that loses no step."""

import abc
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_like.plugins import refuse_replaced
from verl_like.protocol import Metric, merge_metrics
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.checkpoint import begin, save_models, save_training
from verl_like.trainer.experience import Experience, Update
from verl_like.trainer.recorder import LoopRecorder
from verl_like.trainer.run_state import LAST_ROW

Log = Callable[[Mapping[str, Metric | float]], None]
"""Adds metrics to the row of a step."""


_INSTEAD_OF_NEXT_STEP = (
    "a step takes its batch itself: override step, which returns the metrics of a step, or take, which gives what it "
    "trains on"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class TrainingLoop(abc.ABC):
    """Takes experience of a version, learns from it, hands on the weights, validates and saves.

    A subclass says where experience comes from (`take`): its own maker, the buffer of detached training, or batches of
    data. It says how that is learned from (`learn`), and who gets the weights (`hand_on`).
    """

    config: Any
    """A RunConfig whose `trainer` says when to validate and to save."""
    recorder: LoopRecorder
    val_dataset: Any
    """None, or empty, where the loop validates nothing. The makers of detached training report theirs themselves."""
    trained: Mapping[str, WorkerGroup]
    """The groups whose models are trained, by the names of their folders in a checkpoint."""
    global_step: int = 0

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises ValueError for a subclass with a step of earlier versions, which got its batches as arguments."""
        super().__init_subclass__(**arguments)
        refuse_replaced(cls, {"next_step": _INSTEAD_OF_NEXT_STEP})
        parameters = inspect.signature(cls.step).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty and each.kind in _POSITIONAL]
        if needed != ["self"]:
            raise ValueError(
                f"{cls.__module__}.{cls.__name__} has a step({', '.join(needed)}), and a step takes its batch itself: "
                f"leave out {', '.join(needed[1:])}, and override take or learn to change what is trained"
            )

    @abc.abstractmethod
    def take(self) -> Iterator[Experience]:
        """What the present step learns from, whole or in parts as they arrive.

        What follows a `yield` is done while the update runs that was submitted for it.
        """

    @abc.abstractmethod
    def learn(self, experience: Experience) -> Update:
        """Submits the update on experience; returns at once."""

    def metrics_of(self, experience: Experience) -> Mapping[str, Metric]:
        """What is computed of experience on the driver, while it is learned from."""
        return {}

    def account(self, learned: Mapping[str, Metric]) -> Mapping[str, Metric]:
        """Tells where the experience came from that the step is learned, with its metrics; returns what is said there.

        Afterwards `last_step` may be an earlier one.
        """
        return {}

    def hand_on(self) -> None:
        """Gives the weights of the step to those who generate with them."""
        return

    @abc.abstractmethod
    def validate(self) -> dict[str, float]:
        """The metrics of the validation set."""

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return int(self.config.num_steps_of_run)

    def fit(self) -> int:
        """Trains to the last step, validating before and every `test_freq`, and saves the end. Returns that step."""
        self.begin()
        self.recorder.saves_when_ended = True
        while self.global_step < self.last_step:
            self.global_step += 1
            self.run_step()
        return self.global_step

    def step(self) -> dict[str, Metric]:
        """Takes experience of a version, learns from it and hands on the weights; returns the step's metrics."""
        updates: list[Update] = []
        metrics: list[Mapping[str, Metric]] = []
        for experience in self.take():
            updates.append(self.learn(experience))  # submitted: what follows, here and in `take`, runs meanwhile
            self.recorder.commit_checkpoint(wait=False)
            metrics += [experience.metrics, self.metrics_of(experience)]
        metrics.append(Update.of_parts(updates).get())
        learned = merge_metrics(metrics)
        accounted = self.account(learned)
        self.hand_on()
        return merge_metrics([learned, accounted])

    def run_step(self) -> None:
        """A step with its row, its validation and its checkpoint.

        The last one is saved before it is validated, so that whatever ends the run in the validation costs nothing but
        that. One before is validated first, because the best one is saved.
        """
        recorder, is_saved = self.recorder, False
        with recorder.step(self.global_step, self.last_step) as log:
            log(self.step())
            is_last = self.global_step == self.last_step
            if is_last:
                self.save_step(is_last=True)
                with recorder.timer("save_checkpoint"):
                    recorder.commit_checkpoint(wait=True)
                log(self.last_validation())
            elif self.validate_in_step(log) or self.is_saved_by_number or recorder.is_ending:
                is_saved = True
                self.save_step()
        if is_last:
            recorder.complete_checkpoint(self.global_step)
        elif recorder.is_ending:
            self.end_run(is_saved)

    def begin(self) -> None:
        """The validation before the first step, or that which a run that goes on lacks."""
        recorder = self.recorder
        if not recorder.resumed:
            if self.val_dataset and self.config.trainer.val_before_train:
                recorder.log_validation(self.timed_validation())
        elif row := recorder.resumed.checkpoint.state.get(LAST_ROW):
            # Of a run that now has more steps too: the checkpoint is that before the validation.
            with recorder.step(self.global_step, self.last_step, row) as log:
                log(self.last_validation())
            recorder.complete_checkpoint(self.global_step)

    def end_run(self, is_saved: bool) -> None:
        """SIGTERM came: ends the run with the checkpoint of this step, which may not be saved yet."""
        if not is_saved:
            self.save_step()
        self.recorder.commit_checkpoint(wait=True)
        raise KeyboardInterrupt

    @property
    def is_saved_by_number(self) -> bool:
        """Whether `save_freq` says that this step is saved."""
        save_freq = self.config.trainer.save_freq
        return bool(save_freq > 0 and self.global_step % save_freq == 0)

    def save_step(self, is_last: bool = False) -> None:
        """Saves the step: training goes on while workers write, and `commit_checkpoint` makes it a checkpoint.

        Where the run ends with it, so does the writing of the models.
        """
        state = self.state()
        with self.recorder.timer("save_checkpoint"):
            partial = self.save()
            if is_last or self.recorder.is_ending:
                save_models(self.trained, partial)
        self.recorder.begin_checkpoint(partial, self.global_step, state, self.trained)

    def validate_in_step(self, log: Log) -> bool:
        """Validates if that is due before the last step; returns whether it is the best validation so far."""
        if not (self.val_dataset and self.validation_is_due(is_last=False)):
            return False
        metrics = self.timed_validation()
        log(metrics)
        return self.recorder.is_best(self.global_step, metrics)

    def timed_validation(self) -> dict[str, float]:
        """`validate`, apart from the phases of the step."""
        with self.recorder.validation():
            return self.validate()

    def last_validation(self) -> dict[str, float]:
        """The metrics after the last step, if they are due. SIGTERM ends the run at once: its checkpoint is complete,
        and the validation is done again when it goes on."""
        if not (self.val_dataset and self.validation_is_due(is_last=True)):
            return {}
        recorder = self.recorder
        recorder.saves_when_ended = False
        if recorder.is_ending:
            recorder.say("SIGTERM: all steps are saved; the same command validates the last one.")
            raise KeyboardInterrupt
        metrics = self.timed_validation()
        recorder.saves_when_ended = True  # from here on SIGTERM changes nothing: the run is about to end
        recorder.is_best(self.global_step, metrics)
        return metrics

    def validation_is_due(self, is_last: bool) -> bool:
        """Whether this step is followed by a validation: every `test_freq`, and then the last one too."""
        freq = self.config.trainer.test_freq
        return freq > 0 and (is_last or self.global_step % freq == 0)

    def save(self) -> Path:
        """Copies the training state, which is written while training goes on; returns the folder of a checkpoint."""
        self.recorder.commit_checkpoint(wait=True)  # the one before
        folder = begin(self.recorder.run_dir, self.global_step)
        save_training(self.trained, folder)
        return folder

    def state(self) -> dict[str, Any]:
        """What goes on after a resume, beside the models; JSON values."""
        return {"global_step": self.global_step}
