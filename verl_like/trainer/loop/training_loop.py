"""The loop of every trainer: steps, validations and checkpoints, and an end by SIGTERM that loses
no step."""

import abc
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_like.plugins import refuse_replaced
from verl_like.protocol import Metric, merge_metrics
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.loop.recorder import LoopRecorder
from verl_like.trainer.state.checkpoint import begin, save_models, save_training
from verl_like.trainer.state.run_state import LAST_ROW

Log = Callable[[Mapping[str, Metric | float]], None]
"""Adds metrics to the row of a step."""
_REPLACED = {
    "next_step": "override step, which takes its batch itself, or take, which gives what a step "
    "trains on",
    "one_step": "override run_step, which is every step with its row, validation and checkpoint",
}
"""Methods of earlier versions, and what takes their place."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class TrainingLoop(abc.ABC):
    """Takes experience of a version, learns from it, hands on the weights, validates and saves.

    A subclass says where experience comes from (`take`): its own maker, the buffer of detached
    training, or batches of data. It says how that is learned from (`learn`), and who gets the
    weights (`hand_on`).
    """

    config: Any
    """A RunConfig whose `trainer` says when to validate and to save."""
    recorder: LoopRecorder
    val_dataset: Any
    """None, or empty, where the loop validates nothing. The makers of detached training report
    theirs themselves."""
    trained: Mapping[str, WorkerGroup]
    """The groups whose models are trained, by the names of their folders in a checkpoint."""
    global_step: int = 0

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises ValueError for a subclass with a step of earlier versions, which got its batches
        as arguments."""
        super().__init_subclass__(**arguments)
        refuse_replaced(cls, _REPLACED)
        name = f"{cls.__module__}.{cls.__name__}"
        _, *others = inspect.signature(cls.step).parameters.values()
        # Ray adds an argument to the methods of an actor, whose name has an underscore.
        given = [
            each.name
            for each in others
            if each.kind not in _VARIADIC and not each.name.startswith("_")
        ]
        if given:
            raise ValueError(
                f"{name}.step has the arguments {', '.join(given)}, and a step takes its batch "
                "itself: leave them out, and override take or learn to change what is trained"
            )
        if callable(cls.last_step):
            raise ValueError(
                f"{name}.last_step is a method, and it is the number of the last step: make it a "
                "property, and override run_step to change what is done in a step"
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
        """Tells the source of the experience that the step is learned, with its metrics; returns
        the source's metrics.

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
        """Trains to the last step, validating before and every `test_freq`, and saves the end.
        Returns that step."""
        self.begin()
        while self.global_step < self.last_step:
            self.recorder.saves_when_ended = True
            self.global_step += 1
            self.run_step()
        return self.global_step

    def step(self) -> dict[str, Metric]:
        """Takes experience of a version, learns from it and hands on the weights; returns the
        step's metrics."""
        updates: list[Update] = []
        metrics: list[Mapping[str, Metric]] = []
        for experience in self.take():
            # The update is submitted: what follows, here and in `take`, runs meanwhile.
            updates.append(self.learn(experience))
            self.recorder.commit_checkpoint(wait=False)
            metrics += [experience.metrics, self.metrics_of(experience)]
        metrics.append(Update.of_parts(updates).get())
        learned = merge_metrics(metrics)
        accounted = self.account(learned)
        self.hand_on()
        return merge_metrics([learned, accounted])

    def run_step(self) -> None:
        """A step with its row, its validation and its checkpoint.

        The last step is saved before it is validated, so that whatever ends the run in the
        validation costs nothing but that. An earlier one is validated first, because the best one
        is saved.
        """
        recorder = self.recorder
        folder: Path | None = None
        with recorder.step(self.global_step, self.last_step) as log:
            log(self.step())
            is_last = self.global_step == self.last_step
            if is_last:
                self.save_step(is_last=True)
                with recorder.timer("save_checkpoint"):
                    recorder.commit_checkpoint(wait=True)
                log(self.last_validation())
            else:
                is_best = self.validate_in_step(log)
                if is_best or self.is_saved_by_number or recorder.is_ending:
                    folder = self.save_step()
        if is_last:
            recorder.complete_checkpoint(self.global_step)
        elif recorder.is_ending:
            self.end_run(folder)

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

    def end_run(self, folder: Path | None) -> None:
        """SIGTERM came: ends the run with the checkpoint of this step and its models.

        `folder` is that of the checkpoint, or None where SIGTERM came after the step, which is not
        saved.
        """
        if folder is None:
            self.save_step()
        else:
            not_written = [
                role for role in self.trained if not (folder / role / "huggingface").exists()
            ]
            save_models({role: self.trained[role] for role in not_written}, folder)
        self.recorder.commit_checkpoint(wait=True)
        raise KeyboardInterrupt

    @property
    def is_saved_by_number(self) -> bool:
        """Whether `save_freq` says that this step is saved."""
        save_freq = self.config.trainer.save_freq
        return bool(save_freq > 0 and self.global_step % save_freq == 0)

    def save_step(self, is_last: bool = False) -> Path:
        """Saves the step: training goes on while workers write, and `commit_checkpoint` makes it a
        checkpoint.

        If the run ends with this step, the models are written too. Returns the folder.
        """
        with self.recorder.timer("save_checkpoint"):
            partial = self.save()
            if is_last or self.recorder.is_ending:
                save_models(self.trained, partial)
        self.recorder.begin_checkpoint(partial, self.global_step, self.state(), self.trained)
        return partial

    def validate_in_step(self, log: Log) -> bool:
        """Validates if that is due before the last step; returns whether it did, and it is the best
        one so far."""
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
        """The metrics after the last step, if they are due. SIGTERM ends the run at once: its
        checkpoint is complete, and the validation is done again when it goes on."""
        if not (self.val_dataset and self.validation_is_due(is_last=True)):
            return {}
        recorder = self.recorder
        recorder.saves_when_ended = False
        if recorder.is_ending:
            recorder.say("SIGTERM: all steps are saved; the same command validates the last one.")
            raise KeyboardInterrupt
        metrics = self.timed_validation()
        # From here on SIGTERM changes nothing: the run is about to end
        recorder.saves_when_ended = True
        recorder.is_best(self.global_step, metrics)
        return metrics

    def validation_is_due(self, is_last: bool) -> bool:
        """Whether this step is followed by a validation: every `test_freq`, and then the last one
        too."""
        freq = self.config.trainer.test_freq
        return freq > 0 and (is_last or self.global_step % freq == 0)

    def save(self) -> Path:
        """Copies the training state, which is written while training goes on; returns the folder of
        a checkpoint."""
        self.recorder.commit_checkpoint(wait=True)  # the one before
        folder = self.new_folder()
        save_training(self.trained, folder)
        return folder

    def new_folder(self) -> Path:
        """The folder of this step's checkpoint, empty."""
        return begin(self.recorder.run_dir, self.global_step)

    def state(self) -> dict[str, Any]:
        """What goes on after a resume, beside the models; JSON values."""
        return {"global_step": self.global_step}
