"""A maker of detached training. It makes experience with the weights that the trainers push, and
sends the experience to them."""

import contextlib
import inspect
import itertools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from verl_like.data.prompt_dataset import PromptDataset
from verl_like.data.sampler import EpochSampler
from verl_like.protocol import DataProto, Future, Metric, Part, merge_metrics
from verl_like.protocol.samples import SampleRows, concat_samples
from verl_like.single_controller.failure import CallTimeout, WorkerError
from verl_like.single_controller.local.worker_group import LocalCall
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.detached import TRAINED, DetachedConfig
from verl_like.trainer.config.roles import Role
from verl_like.trainer.detached.ledger import Ticket
from verl_like.trainer.detached.side import (
    GONE,
    POLL_S,
    EnvInfo,
    ModelFn,
    PushedWeights,
    Question,
    Side,
    ask,
    remote,
    side_died,
    side_named,
)
from verl_like.trainer.ppo import engine_check
from verl_like.trainer.ppo.experience_maker import Experience, ExperienceMaker, Weights
from verl_like.trainer.ppo.inputs import check_inputs, prompt_sampler
from verl_like.trainer.ppo.maker_driver import get_maker_driver
from verl_like.trainer.ppo.workers import load_models
from verl_like.trainer.run.errors import EngineMismatch
from verl_like.trainer.run.run_recorder import placement_rows
from verl_like.workers.copies import ActorCopyWorker, CriticCopyWorker
from verl_like.workers.rollout.router import ResponsesFuture, router_of
from verl_like.workers.weights.arrival import StaleWeightsError

LOAD_TRIES = 3
"""How often loading is tried when newer weights overwrite the ones being read."""


def maker_models(
    config: DetachedConfig, mapping: Mapping[str, RayClassWithInitArgs]
) -> dict[str, RayClassWithInitArgs]:
    """The workers of a maker's roles. `mapping` has those of a synchronous run.

    Copies take the places of actor and critic. They compute but do not train. A copy gets those
    arguments of the worker that it replaces which its own constructor has.
    """
    copies: dict[str, type] = {Role.Actor: ActorCopyWorker, Role.Critic: CriticCopyWorker}
    own = {}
    for role in config.plan.maker_roles:
        built = mapping[role]
        if role in copies:
            copy_class = copies[role]
            parameters = inspect.signature(copy_class).parameters
            kwargs = {name: value for name, value in built.kwargs.items() if name in parameters}
            built = RayClassWithInitArgs(copy_class, **kwargs)
            built.plugins = config.plugins
        own[role] = built
    return own


def check_maker(config: DetachedConfig, maker: type[ExperienceMaker], rollout: WorkerGroup) -> None:
    """Raises ValueError if a plugin's maker or rollout worker has a method of its own that
    `detached.update_in_flight` would not call. It does call the maker's `sample` and `complete`."""
    if not config.detached.update_in_flight:
        return
    own = [
        name
        for name in ("make", "begin")
        if getattr(maker, name) is not getattr(ExperienceMaker, name)
    ]
    if own:
        raise ValueError(
            f"the plugin's maker {maker.__name__} has its own {', '.join(own)}, which "
            "detached.update_in_flight=true does not call, since it has the responses generated "
            "itself; set it to false"
        )
    # An override without this library's @register has no call_fn.
    if rollout.generate_sequences.call_fn is None:
        raise ValueError(
            f"the worker of {rollout.role} has its own generate_sequences, which "
            "detached.update_in_flight=true does not call, since the maker sends requests to the "
            "engine itself; set it to false"
        )


@dataclass
class InFlight:
    """A prompt whose n responses are being generated."""

    ticket: Ticket
    prompt: DataProto
    """A batch of one row."""
    responses: ResponsesFuture
    is_renewed: bool = False
    """True if the responses were begun again with newer weights. This is done once at most."""

    def age(self, ages: Mapping[str, int]) -> float:
        """Returns how many steps of the engine ago the oldest unfinished response was begun.
        `ages` has this number for each unfinished response, by the name of its request.

        It is infinite if all responses are finished or were begun again, because such a group is
        not begun again.
        """
        if self.is_renewed:
            return math.inf
        unfinished = [ages[name] for name in self.responses.call.requests if name in ages]
        return max(unfinished, default=math.inf)


@dataclass
class PromptLoader:
    """Loads the prompts that tickets name by their numbers."""

    dataset: PromptDataset
    sampler: EpochSampler

    @classmethod
    def of(cls, config: DetachedConfig, prompts: PromptDataset) -> "PromptLoader":
        """Makes a loader that numbers the prompts in the order of the configuration."""
        return cls(prompts, prompt_sampler(config, prompts))

    def load(self, tickets: Sequence[Ticket]) -> list[tuple[list[Ticket], DataProto]]:
        """Loads the prompts of some tickets. Returns a batch (B,) for each training step, with the
        tickets of the batch. The number of the step seeds the sampling."""
        batches = []
        size = self.sampler.batch_size
        tickets_of_steps = itertools.groupby(tickets, lambda ticket: ticket.number // size)
        for step, of_step in tickets_of_steps:
            its_tickets = list(of_step)
            epoch, indices = self.sampler.batch(step)
            places = [ticket.number % size for ticket in its_tickets]
            rows = [self.dataset[indices[place]] for place in places]
            prompts = self.dataset.collate(rows, epoch)
            prompts.meta_info |= {"epoch": epoch, "global_steps": step + 1}
            batches.append((its_tickets, prompts))
        return batches


@remote(concurrency_groups={"weights": 1, "status": 1})
class ExperienceMakerHolder(Side):
    """The driver of one maker, as a named Ray actor.

    Args:
        detached_trainer_name_list: the names of the trainers that get the experience. A ticket has
            the index of its trainer in this list.
        env_info: says which of the makers this is. The first one validates, see
            `trainer.test_freq`.
        start: how often this maker has been started. It is part of the maker's name in the ledger,
            so that the ledger can tell it from the process that it replaces.
        validated: the version that the replaced process validated last, or -1.

    The other arguments are those of `Side`.
    """

    def __init__(
        self,
        config: DetachedConfig,
        detached_trainer_name_list: Sequence[str],
        model_fn: ModelFn | None = None,
        env_info: EnvInfo | None = None,
        start: int = 1,
        validated: int = -1,
        pools: ResourcePoolManager | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(config, model_fn, env_info, pools, fingerprints)
        self.config = config.of_maker(self.name)
        self.trainer_names = detached_trainer_name_list
        self.name_in_ledger = f"{self.name}.{start}"
        self.cleanup = contextlib.ExitStack()
        self.version = -1
        """The version of the weights with which responses are generated. It is -1 before the first
        push, and while some workers have newer weights than others."""
        self.validated = validated
        """The version that was validated last."""
        self.is_compared = False
        """True once the engines have been compared with the first trainer's actor."""
        self.has_pushed = threading.Condition()
        """It is notified when a trainer has pushed weights."""
        self.in_flight: dict[str, InFlight] = {}
        """By the uid of its prompt, each group that is being generated with
        `detached.update_in_flight`."""
        self.sent: dict[Any, str] = {}
        """For experience that was sent, Ray's reference to the answer -> the trainer's name."""
        self.unsent_metrics: Mapping[str, Metric] = {}
        """Metrics of experience of which no prompt was sent, because agents failed. They travel
        with the next experience."""

    def start(self) -> PromptLoader:
        """Starts the workers and loads the models. Returns a loader of the configuration's
        prompts."""
        config = self.config
        inputs = check_inputs(config, self.cleanup)
        if self.model_fn:
            mapping = dict(self.model_fn(config))
        else:
            mapping = maker_models(config, inputs.role_worker_mapping)
        inputs = replace(inputs, config=config, role_worker_mapping=mapping)
        run = get_maker_driver().of(inputs, self.recorder, self.pools)
        self.run = run
        run.groups = run.start_groups()
        run.maker = run.build_maker()
        check_maker(config, type(run.maker), run.groups[Role.Rollout])
        kl_coef = self.ledger.kl_coef()
        if kl_coef is not None:
            run.maker.kl_controller.value = kl_coef
        self.recorder.show_placement(placement_rows(run.placement))
        load_models(run.groups, config.trainer.device, run.show_episodes)
        self.require_same_inputs()
        return PromptLoader.of(config, inputs.train_dataset)

    def workingloop(
        self, data_loader: PromptLoader | None = None, num_steps: int | None = None
    ) -> int:
        """Makes experience and sends it, until the ledger gives no more tickets, or in `num_steps`
        rounds. Returns the number of rounds that made experience.

        In each round it loads newer weights if there are any, validates if that is due, and makes
        experience of as many prompts as the ledger allows. With a `data_loader`, it loads the
        prompts instead of those of the configuration. Raises CallTimeout if the loop waits too long
        for newer weights.
        """
        with self.recorder.timer("starting"):
            own_loader = self.start()
        loader = data_loader or own_loader
        most_steps = math.inf if num_steps is None else num_steps
        done = 0
        waiting_since = time.monotonic()
        newest = self.ask_trainer("newest_weights")
        if newest:
            self.keep_newest(newest)
        while self.in_flight or done < most_steps:
            self.use_newest_weights()
            limit = self.config.plan.num_prompts_at_a_time - len(self.in_flight)
            is_due = self.validation_is_due()
            if is_due and not self.in_flight:
                self.validate()
            elif is_due or done >= most_steps:
                limit = 0  # nothing begins until all in flight has ended and was sent
            tickets: Sequence[Ticket] | None = []
            if self.version >= 0:
                tickets = self.ledger.take(self.name_in_ledger, self.version, limit)
            if tickets is None:
                break
            for its_tickets, prompts in loader.load(tickets):
                if self.config.detached.update_in_flight:
                    self.submit(its_tickets, prompts)
                else:
                    with self.recorder.timer("making experience"):
                        experience = self.run.maker.make(prompts)
                    self.send(its_tickets, experience)
            if self.in_flight:
                done += self.advance()
            elif tickets:
                done += 1
            else:
                self.wait_for_weights(waiting_since)
                continue
            waiting_since = time.monotonic()
        self.wait_for_sent()
        return done

    def use_newest_weights(self) -> None:
        """Loads newer weights if there are any. If there are, it compares the engines unless that
        has been done, and begins young responses again if they are to be renewed."""
        version_before = self.version
        self.load_newest_weights()
        if self.version <= version_before:
            return
        if not self.is_compared:
            self.compare_engines()
        if self.in_flight and self.config.detached.restart_below:
            self.restart_young()

    def wait_for_weights(self, since: float) -> None:
        """Waits a moment for newer weights. Raises CallTimeout if the loop has waited too long
        since the time `since`."""
        # A trainer waits less long, because it may be waiting for another maker.
        patience_s = 3 * self.config.trainer.call_timeout_s
        is_late = time.monotonic() - since > patience_s
        if is_late and self.ledger.seconds_since_loss() > patience_s:
            waited_for = f"weights newer than version {self.version}, from {self.trainer_names[0]}"
            raise CallTimeout(self.name, "workingloop", patience_s, waited_for)
        with self.recorder.timer("waiting for weights"), self.has_pushed:
            self.has_pushed.wait(timeout=POLL_S)

    def compare_engines(self) -> None:
        """Raises EngineMismatch unless the replicas of the rollout engine, and the copy of the
        actor, compute the same model as the first trainer's actor.

        If that actor is in a step or has other weights by now, nothing is compared yet, and
        `use_newest_weights` calls this again when it has loaded newer weights.
        """
        groups = self.run.groups
        config = self.config
        rollout = groups[Role.Rollout]
        unknown = engine_check.unknown_parameters(rollout)
        if unknown:
            raise EngineMismatch(
                f"{self.name}: it is not known how vLLM keeps {', '.join(unknown)}, so its "
                "log-probabilities would be compared with the actor's after each update, which "
                "main_detached does not do: use main_ppo, or set actor_rollout_ref.rollout.name=hf."
            )
        drawn = engine_check.draw(rollout, self.run.train_dataset)
        if not drawn:
            self.recorder.say(engine_check.UNKNOWN_ROLLOUT)
        # Asked even if nothing was drawn, because the trainer's next step waits for it.
        log_probs = self.ask_trainer("score_greedy", self.name, self.version, drawn)
        if log_probs is None:  # the actor is in a step, or has other weights by now
            return
        engine_check.require_one_model(config, f" of {self.name}", drawn, log_probs)
        copy = groups.get(Role.Actor)
        if drawn and copy:
            what = f"the copy of the actor of {self.name}"
            of_copy = engine_check.log_probs_of(copy, drawn)
            for own, of_actor in zip(of_copy, log_probs, strict=True):
                engine_check.require_close(config, what, own, of_actor)
        self.is_compared = True

    def submit(self, tickets: Sequence[Ticket], prompts: DataProto) -> None:
        """Begins the responses to (B,) prompts while others are being generated."""
        groups = self.run.groups
        begin = groups[Role.Rollout].generate_sequences
        agents = groups.get(Role.Agent)
        if agents:
            begin = agents.run_episodes
        uids = prompts.non_tensor_batch["uid"]
        for row, (ticket, uid) in enumerate(zip(tickets, uids, strict=True)):
            prompt = prompts.rows(row, row + 1)
            responses = begin.remote(prompt)
            assert isinstance(responses, ResponsesFuture), "check_maker refuses other rollouts"
            self.in_flight[uid] = InFlight(ticket, prompt, responses)

    def restart_young(self) -> None:
        """Begins young responses again with the weights that were just loaded, and tells the ledger
        that these prompts have no older tokens any more.

        Young are those that were begun less than `detached.restart_below` steps of the engine ago.
        Each prompt is begun again once at most.
        """
        router = router_of(self.run.groups[Role.Rollout])
        ages = router.ages()
        limit = self.config.detached.restart_below
        tickets = []
        for group in self.in_flight.values():
            if group.age(ages) < limit:
                group.responses.call.begin_again()
                group.is_renewed = True
                tickets.append(group.ticket)
        self.ledger.renew(self.name_in_ledger, tickets, self.version)

    def advance(self) -> int:
        """Makes experience of the prompts in flight whose responses are all complete, and sends it.
        Returns 1, or 0 if there are none after a short wait.

        The engine generates the other responses meanwhile.
        """
        router = router_of(self.run.groups[Role.Rollout])
        maker = self.run.maker
        with self.recorder.timer("making experience"):
            calls = [group.responses.call for group in self.in_flight.values()]
            router.wait_for_any(calls, POLL_S)
            ended = []
            for uid, group in list(self.in_flight.items()):
                if group.responses.done():
                    del self.in_flight[uid]
                    ended.append(group)
            if not ended:
                return 0
            tickets = [group.ticket for group in ended]
            prompts = DataProto.concat([group.prompt.select(meta_info_keys=[]) for group in ended])
            prompts.meta_info = dict(ended[0].prompt.meta_info)
            responses = concat_samples([group.responses.get() for group in ended])
            # `sample` takes the future of a generation. This one is done already.
            call = LocalCall([], [Part(None, responses)], None)
            generation = Future(call, lambda outputs: outputs[0])
            generated = maker.sample(prompts, None, generation)
            experience = maker.complete(generated)
            self.send(tickets, experience)
        return 1

    def send(self, tickets: Sequence[Ticket], experience: Experience) -> None:
        """Sends the experience of each ticket to the ticket's trainer, without waiting until it has
        arrived. Before that it waits until the previous experience has arrived."""
        self.wait_for_sent()
        config = self.config
        if config.algorithm.use_kl_in_reward:
            kl_coef = self.run.maker.kl_controller.value
            self.ledger.keep_kl_coef(self.version, kl_coef)
        # The reward function's further results are left out: their names may differ from call to
        # call, and nothing learns from them.
        batch = experience.batch.select(non_tensor_batch_keys=["uid", "policy_version"])
        if config.algorithm.rollout_correction.bypass_mode:
            batch.tensor_batch.pop("old_log_probs")  # rollout_log_probs are the same
        samples = SampleRows.of(batch)
        sample_of_row = samples.sample_of_row.numpy()
        # Of each row, the place of its ticket in `tickets`.
        place_of_row = sample_of_row // config.actor_rollout_ref.rollout.n
        is_dropped = self.drop_failed(tickets, batch, place_of_row)
        metrics = merge_metrics([self.unsent_metrics, experience.metrics])
        for index, name in enumerate(self.trainer_names):
            places = [
                place
                for place, ticket in enumerate(tickets)
                if ticket.trainer == index and not is_dropped[place]
            ]
            if not places:
                continue
            is_its_own = np.isin(place_of_row, places)
            its_rows = batch
            if not is_its_own.all():
                its_rows = batch.select_idxs(is_its_own)
            its_tickets = [tickets[place] for place in places]
            trainer = side_named(name)
            answer = trainer.extend.remote(self.name_in_ledger, its_tickets, its_rows, metrics)
            self.sent[answer] = name
            metrics = {}  # only one trainer gets them, so that they count once
        self.unsent_metrics = metrics

    def drop_failed(
        self, tickets: Sequence[Ticket], batch: DataProto, place_of_row: np.ndarray
    ) -> np.ndarray:
        """Tells the ledger which prompts have no episode that could be trained, because agents
        failed. Returns for each ticket whether it is one of these, (T,) bool."""
        is_failed = batch.tensors().get("is_failed")
        if is_failed is None:
            return np.zeros(len(tickets), dtype=np.bool_)
        num_rows = np.bincount(place_of_row)
        num_failed = np.bincount(place_of_row, weights=is_failed.numpy())
        is_dropped = num_failed == num_rows
        dropped = list(itertools.compress(tickets, is_dropped))
        self.ledger.drop(self.name_in_ledger, dropped)
        return is_dropped

    def wait_for_sent(self) -> None:
        """Waits until the trainers have the experience that was sent, `trainer.call_timeout_s` for
        all of them together. Raises CallTimeout if one does not answer in that time, and WorkerDied
        if one is gone."""
        timeout_s = self.config.trainer.call_timeout_s
        with self.recorder.timer("waiting for experience to arrive"):
            deadline = time.monotonic() + timeout_s
            for reference, name in self.sent.items():
                seconds_left = max(0.0, deadline - time.monotonic())
                try:
                    ray.get(reference, timeout=seconds_left)
                except ray.exceptions.GetTimeoutError:
                    waited_for = f"its experience to arrive at {name}"
                    raise CallTimeout(self.name, "send", timeout_s, waited_for) from None
                except GONE as error:
                    raise side_died(name, "extend", error) from None
        self.sent = {}

    @ray.method(concurrency_group="weights")
    def update_experience_maker(self, weights: PushedWeights) -> None:
        """Takes weights that a trainer pushes. The maker loads them before it generates again."""
        self.keep_newest(weights)

    def keep_newest(self, weights: PushedWeights) -> None:
        """Keeps weights until they are loaded, unless there are newer ones already."""
        with self.has_pushed:
            if self.pushed is None or self.pushed.version < weights.version:
                self.pushed = weights
                self.has_pushed.notify_all()

    def load_newest_weights(self) -> None:
        """Has the engines and the copies load the weights that were pushed last, if they are newer.
        All of them get the same version.

        If a trainer died and took a part of the weights with it, the maker keeps its version. If
        newer weights overwrote a part, the maker loads all of the newer ones instead. Raises
        WorkerError if loading fails for another reason, or if weights were overwritten in each of
        `LOAD_TRIES` tries.
        """
        for tries_left in reversed(range(LOAD_TRIES)):
            weights = self.pushed
            if weights is None or weights.version <= self.version:
                return
            with self.recorder.timer("update_weights"):
                if self.config.actor_rollout_ref.rollout.sends_directly:
                    # The newest weights, which the trainer keeps until it has sent them. The
                    # deadline is long because it may have to end a step first.
                    held: PushedWeights = self.ask_trainer(
                        "hold_weights", self.name_in_ledger, num_calls=3
                    )
                    weights = held
                if not self.wait_for_exports(weights):
                    return
                try:
                    self.load(weights)
                except WorkerError as error:
                    self.version = -1  # some workers may have the new weights already
                    were_overwritten = StaleWeightsError.__name__ in error.headline()
                    if not tries_left or not were_overwritten:
                        raise
                    newest: PushedWeights = self.ask_trainer("newest_weights")
                    if newest.version == weights.version:
                        raise
                    self.keep_newest(newest)
                else:
                    self.version = weights.version
                    return

    def wait_for_exports(self, weights: PushedWeights) -> bool:
        """Waits until the trainer has exported the weights. Returns False if a trainer has died,
        which ends the run."""
        headers = []
        for export in weights.exports.values():
            for part in export.parts:
                headers.append(part.header)
        deadline_s = self.config.trainer.call_timeout_s
        try:
            ray.get(headers, timeout=deadline_s)
        except ray.exceptions.GetTimeoutError:
            waited_for = f"weights of version {weights.version}, from {self.trainer_names[0]}"
            raise CallTimeout(self.name, "load_newest_weights", deadline_s, waited_for) from None
        except ray.exceptions.RayError:
            return False
        return True

    def load(self, weights: PushedWeights) -> None:
        """Has the engines and the copies load the weights."""
        maker = self.run.maker
        weights_of_actor = self.weights_of_actor(weights)
        if self.config.detached.update_in_flight:
            maker.load_weights(weights_of_actor, drain=False)
        else:
            maker.load_weights(weights_of_actor)
        groups = self.run.groups
        for role in groups.keys() & set(TRAINED):
            groups[role].load_weights(weights.exports[role], version=weights.version)

    def ask_trainer(self, method: str, *args: Any, num_calls: int = 1) -> Any:
        """Calls a method of the first trainer and returns its result. The trainer may take as long
        as `num_calls` calls of workers."""
        deadline_s = num_calls * self.config.trainer.call_timeout_s
        return ask(self.trainer_names[0], method, *args, timeout=deadline_s)

    def weights_of_actor(self, weights: PushedWeights) -> Weights:
        """The weights that the engines load. If they come straight from the trainer's GPUs, their
        method `send` has the trainer send them while the engines load."""

        def send(num_receivers: int) -> Question:
            trainer = self.trainer_names[0]
            maker = self.name_in_ledger
            timeout_s = self.config.trainer.call_timeout_s
            return Question.asked(trainer, "send_weights", maker, num_receivers, timeout=timeout_s)

        exports = weights.exports[Role.Actor]
        return Weights(exports, weights.version, send, weights.address)

    def validation_is_due(self) -> bool:
        """Returns whether this maker has to validate now. The first maker validates before training
        if `trainer.val_before_train` says so. Later it validates with the first version that it
        gets after every `trainer.test_freq` steps."""
        trainer = self.config.trainer
        if self.index != 0:
            return False
        if self.version < 0:  # no weights, or not the same in all workers
            return False
        if self.version == 0:
            return trainer.val_before_train and self.validated < 0
        if trainer.test_freq <= 0:
            return False
        num_due = self.version // trainer.test_freq
        num_done = max(0, self.validated) // trainer.test_freq
        return num_due > num_done

    def validate(self) -> None:
        """Validates with the present weights. The next report has the metrics."""
        self.validated = self.version
        self.run.global_step = self.version
        with self.recorder.validation():
            metrics = self.run.validate()
        self.recorder.log_validation(metrics, self.version)

    def finish(self, version: int) -> None:
        """Loads the last weights, which have this version. The first maker validates with them,
        unless it has done so. This is called after the loop."""
        self.load_newest_weights()
        assert self.version == version, (self.version, version)
        validates = self.index == 0 and self.config.trainer.test_freq > 0
        if validates and self.validated != version:
            self.validate()
        self.cleanup.close()
