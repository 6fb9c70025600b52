"""The policy's roles in one process: the actor's weights reach the rollout, whose samples the actor
scores."""

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from rollout_requests import StepByStep
from tiny_worker_models import (
    RESPONSE,
    critic_config,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    reward_config,
    write_model,
    write_reward_model,
)

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import deep_equal
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.workers.actor import ActorWorker
from verl_like.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.reward_model import RewardModelWorker
from verl_like.workers.rollout_worker import RolloutWorker

POLICY_ROLES = (ActorWorker, ReferenceWorker, RolloutWorker)


@pytest.fixture
def config(tmp_path):
    config = policy_config(write_model(tmp_path / "policy"), prompts=2)
    rollout = config.rollout.model_copy(update={"name": "hf", "n": 3, "dtype": "float32"})
    return config.model_copy(update={"rollout": rollout})


def prompts():
    rows = make_batch(rows=2)
    return DataProto.from_dict(
        tensors={"prompts": rows.batch["prompts"]},
        non_tensors={"uid": ["0-0", "0-1"]},
        meta_info=rows.meta_info | {"global_steps": 1, "validate": False},
    )


def response_lengths(batch):
    return batch.batch["responses"].offsets().diff().tolist()


@pytest.mark.parametrize("transport", ["object_store", "shared_memory", "gloo"])
def test_the_rollout_samples_from_the_weights_the_actor_exported(config, transport):
    rollout_config = config.rollout.model_copy(update={"weight_transport": transport})
    config = config.model_copy(update={"rollout": rollout_config})
    actor = local_group(ActorWorker, config)
    rollout = local_group(RolloutWorker, config, seed=1)
    for parameter in actor.workers[0].engine.parameters:
        parameter.data.mul_(0.9)
    rollout.load_weights(actor.export_weights(version=3), version=3)
    batch = rollout.generate_sequences(prompts()).get()
    assert len(batch) == 6
    responses = batch.batch["responses"].unbind()
    assert all(
        len(each) == RESPONSE or each[-1] in rollout.workers[0].rollout.eos_token_ids
        for each in responses
    )
    assert [spans[0][0] for spans in batch.non_tensor_batch["policy_version"]] == [3] * 6


def test_the_address_of_a_call_takes_the_place_of_the_one_in_the_export(config):
    rollout_config = config.rollout.model_copy(update={"weight_transport": "gloo"})
    config = config.model_copy(update={"rollout": rollout_config})
    actor = local_group(ActorWorker, config)
    rollout = local_group(RolloutWorker, config, seed=1)
    (export,) = actor.export_weights(version=3).get()
    elsewhere = dataclasses.replace(export, address=("127.0.0.1", 9))
    rollout.load_weights([elsewhere], version=3, address=export.address)
    batch = rollout.generate_sequences(prompts()).get()
    assert [spans[0][0] for spans in batch.non_tensor_batch["policy_version"]] == [3] * 6
    scored = actor.compute_log_prob(batch).get().batch["old_log_probs"]
    torch.testing.assert_close(
        scored.values(), batch.batch["rollout_log_probs"].values(), rtol=0, atol=1e-4
    )


def test_a_second_init_model_of_the_rollout_is_refused_and_makes_no_second_engine(config):
    (worker,) = local_group(RolloutWorker, config, seed=1).workers
    engine = worker.rollout
    with pytest.raises(ValueError, match="init_model is called again on rank 0, which has a roll"):
        worker.init_model()
    assert worker.rollout is engine


def actor_and_rollout_that_ends_early(config, worker_class=RolloutWorker):
    """The groups, the rollout with the weights as version 3, and its responses, which every fourth
    token ends."""
    actor, rollout = local_group(ActorWorker, config), local_group(worker_class, config, seed=1)
    rollout.load_weights(actor.export_weights(version=3), version=3)
    rollout.workers[0].rollout.eos_token_ids = tuple(range(3, 1000, 4))
    return actor, rollout, rollout.generate_sequences(prompts()).get()


def test_prompts_that_come_one_by_one_get_the_same_responses_each_when_all_of_its_own_have_ended(
    config,
):
    actor, rollout, whole = actor_and_rollout_that_ends_early(config)
    lengths = response_lengths(whole)
    last = [max(lengths[:3]), max(lengths[3:])]
    assert last[0] > 2 and min(lengths[:3]) <= 2 and last[1] > min(lengths[3:]), lengths
    thread = rollout.workers[0].engine_thread
    steps = StepByStep(thread)
    calls = {"0-0": rollout.generate_sequences.remote(prompts()[:1])}
    steps.wait_for(3)
    steps.advance(2)
    rollout.load_weights(actor.export_weights(version=4), version=4, drain=False)  # of equal values
    calls["0-1"] = rollout.generate_sequences.remote(prompts()[1:])
    steps.wait_for(3)
    ended = {}
    for step in range(2, 2 + RESPONSE):
        of_others = {uid: calls[uid] for uid in calls.keys() - ended.keys()}
        for uid, call in of_others.items():
            if thread.ages().keys() & call.call.requests.keys():
                assert not call.done()
            else:
                ended[uid] = (step, call.get(timeout=60))
        steps.advance(1)
    assert {uid: step for uid, (step, _) in ended.items()} == {"0-0": last[0], "0-1": last[1] + 2}
    assert not thread.ages()
    parts = DataProto.concat([ended[uid][1].select(meta_info_keys=[]) for uid in ("0-0", "0-1")])
    for name in ("responses", "response_mask", "prompts"):
        assert deep_equal(parts.batch[name], whole.batch[name]), name
    early = [
        ((3, 0, length),) if length <= 2 else ((3, 0, 2), (4, 2, length)) for length in lengths[:3]
    ]
    assert ended["0-0"][1].non_tensor_batch["policy_version"].tolist() == early
    late = [((4, 0, length),) for length in lengths[3:]]
    assert ended["0-1"][1].non_tensor_batch["policy_version"].tolist() == late


def test_responses_that_are_begun_again_are_drawn_with_the_new_weights_alone(config):
    actor, rollout, whole = actor_and_rollout_that_ends_early(config)
    lengths = response_lengths(whole)
    steps = StepByStep(rollout.workers[0].engine_thread)
    first = rollout.generate_sequences.remote(prompts()[:1])
    steps.wait_for(3)
    steps.advance(1)
    second = rollout.generate_sequences.remote(prompts()[1:])
    steps.wait_for(3)
    assert min(lengths[3:]) == 2 < max(lengths[3:]) and max(lengths[:3]) > 3, (
        "one of 0-1 ends before it is forgotten"
    )
    steps.advance(2)
    assert set(rollout.caller.ages().values()) == {2, 3}
    rollout.load_weights(actor.export_weights(version=4), version=4, drain=False)  # of equal values
    assert next(second.stream()) and second.call.completions
    second.call.begin_again()
    assert not second.call.completions, "they would count as the new ones"
    steps.wait_for(3)
    steps.advance(RESPONSE)
    told = [request.index for part in second.stream() for request, _ in part]
    assert sorted(told) == [0, 1, 2], "each once"
    rows = DataProto.concat(
        [call.get(timeout=60).select(meta_info_keys=[]) for call in (first, second)]
    )
    assert deep_equal(rows.batch["responses"], whole.batch["responses"])
    spans = [
        ((3, 0, length),) if length <= 3 else ((3, 0, 3), (4, 3, length)) for length in lengths[:3]
    ]
    spans += [((4, 0, length),) for length in lengths[3:]]
    assert rows.non_tensor_batch["policy_version"].tolist() == spans


class OwnRollout(RolloutWorker):
    """Generates on the ranks."""

    def generate_sequences(self, prompts):
        return (yield from super().generate_sequences(prompts))


@pytest.mark.parametrize("worker_class", [RolloutWorker, OwnRollout])
def test_nothing_is_told_of_padding_rows(config, worker_class):
    _, rollout, whole = actor_and_rollout_that_ends_early(config, worker_class)
    assert (rollout.generate_sequences.call_fn is None) == (worker_class is OwnRollout)
    is_pad = DataProto.from_dict(tensors={"is_pad": torch.tensor([False, True])})
    generation = rollout.generate_sequences.remote(prompts().union(is_pad))
    told = sorted(
        (request.uid, request.index) for part in generation.stream() for request, _ in part
    )
    assert told == [("0-0", 0), ("0-0", 1), ("0-0", 2)]
    assert deep_equal(generation.get().batch["responses"], whole.batch["responses"])


def test_a_rank_that_is_not_collected_draws_the_same_and_tells_and_keeps_nothing(config):
    actor, rollout, whole = actor_and_rollout_that_ends_early(config)
    (worker,) = rollout.workers
    thread, engine = worker.engine_thread, worker.rollout
    # As if the first rank were asked for the same
    engine.agreed = lambda _: thread._num_ready(engine)
    engine.is_collect = False  # as all but the first rank of a replica
    generation = worker.generate_sequences(prompts())
    with pytest.raises(StopIteration) as end:
        next(generation)
    assert deep_equal(end.value.value.batch["responses"], whole.batch["responses"])
    rollout.submit_requests(engine.rules().requests_of(prompts(), "a call"))
    rollout.load_weights(actor.export_weights(version=4), version=4)  # after the last one has ended
    assert rollout.collect_completions(0.0)[0] == ({}, 0) and not thread._ended


def test_exporting_leaves_the_actor_as_it_is(config):
    actor = local_group(ActorWorker, config)
    before = parameters_of(actor.workers[0])
    actor.export_weights(version=0).get()
    assert all(
        torch.equal(value, before[name]) for name, value in parameters_of(actor.workers[0]).items()
    )


def test_a_role_has_the_methods_of_what_it_is_and_no_others():
    methods = {
        role: set(registered_methods(role)) - set(registered_methods(Worker))
        for role in POLICY_ROLES
    }
    assert methods == {
        ActorWorker: {
            *("compute_log_prob", "compute_ref_log_prob", "update_actor", "export_weights"),
            *("score_greedy", "router_shape", "send_weights", "address_for"),
            *("save_checkpoint", "save_result", "load_checkpoint", "save_hf"),
        },
        ReferenceWorker: {"compute_ref_log_prob"},
        RolloutWorker: {
            "generate_sequences",
            "draw_greedily",
            *(
                "request_rules",
                "submit_requests",
                "collect_completions",
                "abort_requests",
                "request_ages",
            ),
            *("load_weights", "unknown_parameters", "sleep", "wake"),
        },
    }
    # The base has verl's name
    assert all(issubclass(role, ActorRolloutRefWorker) for role in POLICY_ROLES)


def test_ranks_that_share_sequences_get_the_same_rows_of_a_role_like_the_examples(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    example = importlib.import_module("examples.new_role.likelihood").LikelihoodWorker

    class RecordingRole(example):
        """The role's dispatch over four ranks of which two share each sequence, without a model."""

        def __init__(self):
            self.register_mesh("ref", 2)

        def annotate(self, data):
            self.tokens = data.select(batch_keys=["prompts", "responses"])
            return DataProto.from_dict(
                tensors={"likelihood_scores": data.batch["response_mask"].float()}
            )

    group, data = (
        LocalWorkerGroup(ClassWithInitArgs(RecordingRole), world_size=4),
        make_batch(rows=8),
    )
    scores = group.annotate(data).get().batch["likelihood_scores"]
    assert deep_equal(scores, data.batch["response_mask"].float())
    for worker, first in zip(group.workers, (0, 0, 4, 4), strict=True):
        for name, rows in worker.tokens.batch.items():
            assert deep_equal(rows, data[first : first + 4].batch[name])


def test_every_role_reads_weights_on_the_first_rank_alone_and_a_new_value_head_from_the_seed(
    config, tmp_path
):
    rewards = reward_config(write_reward_model(tmp_path / "judge"))
    made = [ActorWorker(config), ReferenceWorker(config)]
    critics = [CriticWorker(critic_config(config.model.path), seed=seed) for seed in (3, 3, 4)]
    for worker in (*made, critics[0], RewardModelWorker(rewards)):
        first, other = (
            list(worker.build_model(with_weights).parameters()) for with_weights in (True, False)
        )
        assert {parameter.device.type for parameter in first} == {"cpu"}
        assert {parameter.device.type for parameter in other} == {"meta"}
    heads = [critic.build_model(True).hf.score.weight for critic in critics]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_the_update_compares_with_the_engine_only_where_nothing_did_before(config):
    batch = make_batch(rows=2)
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] + 0.1
    for without_old in (False, True):
        if without_old:
            batch.batch.pop("old_log_probs")
        config = policy_config(config.model.path, prompts=2, micro=2)
        metrics = local_group(ActorWorker, config).update_actor(batch).get().meta_info
        assert ("training/rollout_probs_diff_mean" in metrics["metrics"]) == without_old
        assert ("actor/entropy" in metrics["metrics"]) == without_old


class RecordingActor(ActorWorker):
    """Tells which columns reach its methods, without a model."""

    def __init__(self):
        self.register_mesh("actor", 1)

    def tell(self, data):
        written = dict.fromkeys(
            ("old_log_probs", "entropys", "ref_log_prob", "values"), torch.zeros(len(data), 1)
        )
        return DataProto.from_dict(tensors=written, meta_info={"columns": set(data.batch.keys())})

    compute_log_prob = update_actor = tell


class RecordingReference(ReferenceWorker):
    def __init__(self):
        self.register_mesh("ref", 1)

    compute_ref_log_prob = RecordingActor.tell


class RecordingCritic(CriticWorker):
    def __init__(self):
        self.register_mesh("critic", 1)

    compute_values = update_critic = RecordingActor.tell


def test_methods_are_sent_the_columns_that_they_read_and_no_others():
    classes = (RecordingActor, RecordingReference, RecordingCritic)
    actor, reference, critic = (
        LocalWorkerGroup(ClassWithInitArgs(worker_class)) for worker_class in classes
    )
    data = make_batch(rows=2)
    data.batch["own_column"] = torch.ones(2, 1)
    sequence = {"prompts", "responses", "response_mask"}
    methods = {
        actor.compute_log_prob: set(),
        actor.update_actor: {"old_log_probs", "ref_log_prob", "advantages"},
        reference.compute_ref_log_prob: set(),
        critic.compute_values: set(),
        critic.update_critic: {"values", "returns"},
    }
    for method, added in methods.items():
        assert method(data).get().meta_info["columns"] == sequence | added


def test_a_method_that_does_not_write_what_it_declares_is_an_error():
    class SilentActor(RecordingActor):
        def compute_log_prob(self, data):
            return DataProto.from_dict(tensors={"old_log_probs": torch.zeros(len(data), 1)})

    class SilentReference(RecordingReference):
        def compute_ref_log_prob(self, data):
            return DataProto.from_dict(tensors={})

    class SilentCritic(RecordingCritic):
        def compute_values(self, data):
            return DataProto.from_dict(tensors={})

    classes = (SilentActor, SilentReference, SilentCritic)
    actor, reference, critic = (
        LocalWorkerGroup(ClassWithInitArgs(worker_class)) for worker_class in classes
    )
    for method, missing in {
        actor.compute_log_prob: "entropys",
        reference.compute_ref_log_prob: "ref_log_prob",
        critic.compute_values: "values",
    }.items():
        with pytest.raises(WorkerError, match=rf"declares to write \['{missing}'\]"):
            method(make_batch(rows=2)).get()


def test_a_model_that_is_not_there_is_named_by_its_key(config, tmp_path):
    missing = str(tmp_path / "nothing")
    model = config.model.model_copy(update={"path": missing})
    workers = {
        "actor_rollout_ref.model": ActorWorker(config.model_copy(update={"model": model})),
        "critic.model": CriticWorker(critic_config(missing), seed=1),
        "reward_model.model": RewardModelWorker(reward_config(missing)),
    }
    for key, worker in workers.items():
        with pytest.raises(ValueError, match=rf"^{key}\.path={missing}"):
            worker.build_model(True)
