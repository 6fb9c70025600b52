"""The loop of a trainer: steps, validations and checkpoints, and an end by SIGTERM that loses no step."""

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.checkpoint import begin, save_models, save_training
from verl_like.trainer.run_recorder import RunRecorder
from verl_like.trainer.run_state import IS_COMPLETE, LAST_ROW


class TrainingLoop(abc.ABC):
    """What trainers have in common; a subclass says what its step and its validation are."""

    config: Any
    """A RunConfig whose `trainer` says when to validate and to save."""
    recorder: RunRecorder
    val_dataset: Any
    """None, or empty, where there is nothing to validate."""
    trained: Mapping[str, WorkerGroup]
    """The groups whose models are trained, by the names of their folders in a checkpoint."""
    global_step: int = 0

    @abc.abstractmethod
    def next_step(self) -> dict[str, float]:
        """Trains on the next batch; returns the step's metrics, among them `training/epoch`."""

    @abc.abstractmethod
    def validate(self) -> dict[str, float]:
        """The metrics of the validation set."""

    def fit(self) -> None:
        """Trains for the configured number of steps, validating before and every `test_freq`, and saves the end."""
        recorder, total_steps = self.recorder, self.config.num_steps_of_run
        if self.val_dataset and self.config.trainer.val_before_train and not recorder.resumed:
            recorder.log_validation(self.timed_validation())
        if recorder.resumed and (row := recorder.resumed.checkpoint.state.get(LAST_ROW)):
            # Of a run that now has more steps too: the checkpoint is that before the validation.
            with recorder.step(self.global_step, total_steps, row) as log:
                log(self.last_validation())
            recorder.renew_checkpoint(self.global_step, {IS_COMPLETE: True})
        recorder.saves_when_ended = True
        while self.global_step < total_steps:
            self.global_step += 1
            if self.global_step < total_steps:
                self.one_step()
            else:
                self.last_step()

    def one_step(self) -> None:
        """A step before the last one. Ends the run that SIGTERM is to end, with the checkpoint of this step."""
        trainer, recorder = self.config.trainer, self.recorder
        with recorder.step(self.global_step, self.config.num_steps_of_run) as log:
            log(self.next_step())
            saves = trainer.save_freq > 0 and self.global_step % trainer.save_freq == 0
            if self.val_dataset and self.validation_is_due(is_last=False):
                metrics = self.timed_validation()
                log(metrics)
                saves |= recorder.is_best(self.global_step, metrics)
            saves |= recorder.is_ending
            if saves:
                with recorder.timer("save_checkpoint"):
                    partial = self.save()
                    if recorder.is_ending:
                        save_models(self.trained, partial)
        if recorder.is_ending and not saves:  # SIGTERM came after the step's end
            saves, partial = True, self.save()
        if saves:
            recorder.begin_checkpoint(partial, self.global_step, self.state(), self.trained)
            if recorder.is_ending:
                recorder.commit_checkpoint(wait=True)
                raise KeyboardInterrupt

    def last_step(self) -> None:
        """Saves before it validates, so that whatever ends the run in the validation costs nothing but that."""
        recorder = self.recorder
        with recorder.step(self.global_step, self.config.num_steps_of_run) as log:
            log(self.next_step())
            with recorder.timer("save_checkpoint"):
                partial = self.save()
                save_models(self.trained, partial)
            row = {name: float(value) for name, value in recorder.row_so_far().items()}
            state = self.state() | {LAST_ROW: row}
            recorder.begin_checkpoint(partial, self.global_step, state, self.trained)
            with recorder.timer("save_checkpoint"):
                recorder.commit_checkpoint(wait=True)
            log(self.last_validation())
        recorder.renew_checkpoint(self.global_step, {IS_COMPLETE: True})

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
