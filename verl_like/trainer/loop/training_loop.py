"""The loop of every trainer: steps, validations and checkpoints. If SIGTERM ends the run, no step
is lost."""

import abc
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from verl_like.plugins import Extensible
from verl_like.protocol import Metric, merge_metrics
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.loop.recorder import Log, LoopRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.run_state import LAST_ROW

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class TrainingLoop(Extensible, abc.ABC):
    """The base class of every trainer. In each step it takes experience, learns from it and hands
    on the weights. Before and after steps it validates and saves checkpoints.

    A subclass implements three things. `take` says where experience comes from: the trainer's own
    maker, the buffer of detached training, or batches of data. `learn` submits the update on it.
    `hand_on` gives the new weights to those who generate with them.
    """

    config: Any
    """A RunConfig. Its block `trainer` says when to validate and when to save."""
    recorder: LoopRecorder
    val_dataset: Any
    """The validation set. If it is None or empty, the loop does not validate: in detached training
    the makers validate, and report the results themselves."""
    trained: Mapping[str, WorkerGroup]
    """The worker groups whose models are trained, by the names of their folders in a checkpoint."""
    global_step: int = 0
    """The number of the present step. It is 0 before the first step, whose number is 1."""
    replaced_methods: ClassVar = {
        "next_step": "override step, which takes its batch itself, or take, which gives what a "
        "step trains on",
        "one_step": "override run_step, which is every step with its row, validation and "
        "checkpoint",
    }

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises ValueError for a subclass that was written for an earlier version: if it has one
        of `replaced_methods`, if its `step` has arguments, or if its `last_step` is a method."""
        super().__init_subclass__(**arguments)
        name = f"{cls.__module__}.{cls.__name__}"
        signature = inspect.signature(cls.step)
        _self, *parameters = signature.parameters.values()
        # Ray adds an argument to the methods of an actor. Its name begins with an underscore.
        own = [parameter for parameter in parameters if not parameter.name.startswith("_")]
        given = [parameter.name for parameter in own if parameter.kind not in _VARIADIC]
        if given:
            raise ValueError(
                f"{name}.step has the arguments {', '.join(given)}, and a step takes its batch "
                "itself: leave them out, and override take or learn to change what is trained"
            )
        if callable(cls.last_step):  # a property is not callable
            raise ValueError(
                f"{name}.last_step is a method, and it is the number of the last step: make it a "
                "property, and override run_step to change what is done in a step"
            )

    @abc.abstractmethod
    def take(self) -> Iterator[Experience]:
        """Yields what the present step learns from, as a whole or in parts as they arrive.

        `step` submits the update on each part before it asks for the next one, so the code after a
        `yield` runs on the driver during that update.
        """

    @abc.abstractmethod
    def learn(self, experience: Experience) -> Update:
        """Submits the update on the experience and returns at once."""

    def metrics_of(self, experience: Experience) -> Mapping[str, Metric]:
        """Computes metrics of the experience on the driver, during the update on it."""
        return {}

    def account(self, learned: Mapping[str, Metric]) -> Mapping[str, Metric]:
        """Tells the source of the experience that the step has been learned, and returns the
        metrics that the source adds to the step's metrics `learned`.

        The source may have less experience left than planned, so `last_step` can be smaller
        afterwards.
        """
        return {}

    def hand_on(self) -> None:
        """Gives the weights of the step to those who generate with them. In training on examples
        there is nobody."""
        return

    @abc.abstractmethod
    def validate(self) -> dict[str, float]:
        """Computes the metrics of the validation set."""

    @property
    def last_step(self) -> int:
        """The number of the step after which the run ends."""
        return int(self.config.num_steps_of_run)

    def fit(self) -> int:
        """Trains until `last_step` and returns the number of the step it ended with.

        It validates before the first step and after every `trainer.test_freq` steps, saves after
        every `trainer.save_freq` steps, and always saves the last one. A run that was resumed
        begins after the step of its checkpoint. With `trainer.val_only` the first validation is
        all.
        """
        self.begin()
        if self.config.trainer.val_only:
            return self.global_step
        while self.global_step < self.last_step:
            self.recorder.saves_when_ended = True
            self.global_step += 1
            self.run_step()
        return self.global_step

    def step(self) -> dict[str, Metric]:
        """Does one training step, which is an update or several on what `take` yields, and returns
        its metrics."""
        updates = []
        metrics = []
        for experience in self.take():
            # The update is only submitted: the lines below, and the rest of `take`, run during it.
            updates.append(self.learn(experience))
            self.recorder.commit_checkpoint(wait=False)
            metrics.append(experience.metrics)
            metrics.append(self.metrics_of(experience))
        whole_update = Update.of_parts(updates)
        metrics.append(whole_update.get())
        learned = merge_metrics(metrics)
        accounted = self.account(learned)
        self.hand_on()
        return merge_metrics([learned, accounted])

    def run_step(self) -> None:
        """Does one step with its row of metrics, and its validation and checkpoint if they are due.

        The last step is saved before it is validated: if something ends the run during the
        validation, only the validation is lost. Any other step is validated first, because the
        validation decides whether it is the best step, which is saved too.
        """
        recorder = self.recorder
        folder = None  # of this step's checkpoint, if it has one
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
        """Validates before the first step of a new run, if `trainer.val_before_train` or
        `trainer.val_only` says so.

        A resumed run validates here only if it was interrupted between the checkpoint of its last
        step and the end of the validation after it. The row of that step is then in the checkpoint.
        """
        recorder = self.recorder
        if not recorder.resumed:
            if self.val_dataset:
                trainer = self.config.trainer
                if trainer.val_before_train or trainer.val_only:
                    metrics = self.timed_validation()
                    recorder.log_validation(metrics)
        elif row := recorder.resumed.checkpoint.state.get(LAST_ROW):
            # This is done even if the run has more steps now, because the checkpoint has no
            # validation yet.
            with recorder.step(self.global_step, self.last_step, row) as log:
                log(self.last_validation())
            recorder.complete_checkpoint(self.global_step)

    def end_run(self, folder: Path | None) -> None:
        """Ends the run after SIGTERM, by raising KeyboardInterrupt. Before that it completes the
        checkpoint of this step, and writes the models into it.

        `folder` is that of the checkpoint, or None if the step has none yet, because SIGTERM came
        after the decision whether to save it.
        """
        if folder is None:
            self.save_step()
        else:
            # `save_step` has written all models if SIGTERM had come by then, and otherwise none.
            has_models = any(folder.glob("*/huggingface"))
            if not has_models:
                checkpoint.save_models(self.trained, folder)
        self.recorder.commit_checkpoint(wait=True)
        raise KeyboardInterrupt

    @property
    def is_saved_by_number(self) -> bool:
        """True if `trainer.save_freq` says that this step is saved."""
        save_freq = self.config.trainer.save_freq
        return save_freq > 0 and self.global_step % save_freq == 0

    def save_step(self, is_last: bool = False) -> Path:
        """Begins the checkpoint of this step and returns its folder.

        First it waits until the previous checkpoint is complete. Workers write the files while
        training goes on. The recorder's `commit_checkpoint` renames the folder once all files are
        written. If the run ends with this step, also by SIGTERM, the models are written too, in the
        format of Hugging Face.
        """
        with self.recorder.timer("save_checkpoint"):
            partial = self.save()
            if is_last or self.recorder.is_ending:
                checkpoint.save_models(self.trained, partial)
        state = self.state()
        self.recorder.begin_checkpoint(partial, self.global_step, state, self.trained)
        return partial

    def validate_in_step(self, log: Log) -> bool:
        """Validates if a validation is due after this step, which is not the last one. Returns True
        if it validated and the result is the best so far."""
        if not (self.val_dataset and self.validation_is_due(is_last=False)):
            return False
        metrics = self.timed_validation()
        log(metrics)
        return self.recorder.is_best(self.global_step, metrics)

    def timed_validation(self) -> dict[str, float]:
        """Calls `validate`, timed as `timing_s/testing`. The calls of workers in it do not count in
        the step's other phases."""
        with self.recorder.validation():
            return self.validate()

    def last_validation(self) -> dict[str, float]:
        """Validates after the last step and returns the metrics, none if no validation is due.

        The step is saved already, so SIGTERM ends the run at once here, and the validation is done
        when the run is resumed.
        """
        if not (self.val_dataset and self.validation_is_due(is_last=True)):
            return {}
        recorder = self.recorder
        recorder.saves_when_ended = False
        if recorder.is_ending:
            recorder.say("SIGTERM: all steps are saved; the same command validates the last one.")
            raise KeyboardInterrupt
        metrics = self.timed_validation()
        # From here on a first SIGTERM is only noted, since the run is about to end.
        recorder.saves_when_ended = True
        recorder.is_best(self.global_step, metrics)  # keeps the step's checkpoint if it is the best
        return metrics

    def validation_is_due(self, is_last: bool) -> bool:
        """Returns whether a validation follows this step. Every `trainer.test_freq`-th step has
        one, and so has the last; with a `test_freq` of 0 or less, no step has one."""
        test_freq = self.config.trainer.test_freq
        if test_freq <= 0:
            return False
        return is_last or self.global_step % test_freq == 0

    def save(self) -> Path:
        """Has the workers copy their training state and write it while training goes on. Returns
        the folder that they write into."""
        self.recorder.commit_checkpoint(wait=True)  # the previous one
        folder = self.new_folder()
        checkpoint.save_training(self.trained, folder)
        return folder

    def new_folder(self) -> Path:
        """Makes the empty folder of this step's checkpoint."""
        return checkpoint.begin(self.recorder.run_dir, self.global_step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the models, as JSON values."""
        return {"global_step": self.global_step}
