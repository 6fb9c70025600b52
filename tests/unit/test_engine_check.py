"""An engine that has the actor's weights and computes another model is found before the first
step."""

import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_requests import StepByStep, rows_of
from test_detached_config import config_of
from test_detached_maker import maker
from tiny_worker_models import PROMPT, RESPONSE, local_group, policy_config, write_model

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.single_controller.failure import CallTimeout
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.detached import comparisons
from verl_like.trainer.detached.comparisons import Comparisons
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.ppo import engine_check
from verl_like.trainer.ppo.engine_check import EngineMismatch
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.copies import ActorCopyWorker
from verl_like.workers.rollout_worker import RolloutWorker
from verl_like.workers.weights.fingerprints import fingerprint_tensor

OTHER_MODELS = {
    "norms": {"rms_norm_eps": 0.3},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}},
}
"""Settings that change what is computed, and no weight."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("compared"))


class FirstPrompts:
    """A data set of three prompts, fewer than are compared, of 1 to 5 tokens."""

    rows = ([7], [3, 9, 4], [20, 21, 22, 23, 24])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[int]:
        return self.rows[index]

    def collate(self, rows: list[list[int]], epoch: int) -> DataProto:
        tensors = {"prompts": jagged_from_lists(rows, torch.int64)}
        uids = [f"{epoch}-{index}" for index in range(len(rows))]
        return DataProto.from_dict(tensors, {"uid": uids}, {"padding": (PROMPT, RESPONSE, 0)})


def config_for(path: str, dtype: str = "float32", **model: Any) -> ActorRolloutRefConfig:
    """Sampling at another temperature and from fewer tokens than the comparison."""
    config = policy_config(path, fsdp={"dtype": dtype})
    sampling = {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "n": 2, "name": "hf", "dtype": dtype}
    rollout = config.rollout.model_copy(update=sampling)
    return config.model_copy(
        update={"rollout": rollout, "model": config.model.model_copy(update=model)}
    )


def replicas(config: ActorRolloutRefConfig, exports: Any, size: int = 2) -> LocalWorkerGroup:
    group = LocalWorkerGroup(
        ClassWithInitArgs(RolloutWorker, config=config, seed=1), world_size=size, role="rollout"
    )
    group.init_model()
    for worker in group.workers:
        worker.load_weights(exports, version=0)  # by fingerprints they are right
    return group


def run_config(policy: ActorRolloutRefConfig) -> Any:
    return SimpleNamespace(actor_rollout_ref=policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_that_compute_the_actors_model_pass(path: str, dtype: str) -> None:
    config = config_for(path, dtype)
    actor = local_group(ActorWorker, config)
    drawn = engine_check.draw(
        replicas(config, actor.export_weights(version=0).get()), FirstPrompts()
    )
    assert [len(batch) for batch in drawn] == [3, 3]
    # 8 tokens, or as many as there is room for; one that ends a response does not end these.
    assert rows_of(drawn[0], "response_mask") == [[1] * 6] * 3
    log_probs = engine_check.log_probs_of(actor, drawn)
    engine_check.require_one_model(run_config(config), "", drawn, log_probs)


def test_the_wrong_tokens_of_one_prompt_are_not_hidden_by_the_mean_over_many(path: str) -> None:
    """Two tokens of each of eleven prompts; those of the tenth are off by 0.3."""
    own = torch.zeros(22)
    of_actor = own.clone()
    of_actor[18:20] = 0.3
    assert (own - of_actor).abs().mean() < engine_check.MEAN_OTHERWISE
    columns = {"rollout_log_probs": jagged_from_lists(own.view(11, 2).tolist(), torch.float32)}
    drawn = [DataProto.from_dict(tensors=columns)]
    config = run_config(config_for(path, "bfloat16"))
    engine_check.require_one_model(config, "", drawn, [own])
    with pytest.raises(EngineMismatch, match=r"of 11 tokens .* mean difference .* is 0\.0545,"):
        engine_check.require_one_model(config, "", drawn, [of_actor])


@pytest.mark.parametrize("other", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_an_engine_that_makes_another_model_of_the_same_weights_is_refused(
    path: str, other: dict[str, Any]
) -> None:
    config = config_for(path)
    actor = local_group(ActorWorker, config)
    exports = actor.export_weights(version=0).get()
    wrong = replicas(config_for(path, override_config=other), exports, size=1)
    drawn = [*engine_check.draw(replicas(config, exports, size=1), FirstPrompts())]
    drawn += engine_check.draw(wrong, FirstPrompts())
    log_probs = engine_check.log_probs_of(actor, drawn)
    own_log_probs = torch.tensor(rows_of(drawn[1], "rollout_log_probs")).flatten()
    differences = (own_log_probs - log_probs[1]).abs()
    worst = int(differences.argmax())
    own, of_actor = own_log_probs[worst], log_probs[1][worst]
    with pytest.raises(EngineMismatch) as error:
        engine_check.require_one_model(run_config(config), " of maker_3", drawn, log_probs)
    message = str(error.value)
    assert message.startswith("rollout replica 1 of maker_3 does not compute the actor's model")
    assert (
        f"difference of log-probabilities is {differences.max():.3g}, and at most 0.001" in message
    )
    assert f"it has {own:.6f} and the actor {of_actor:.6f}" in message


def test_the_greedy_tokens_and_log_probabilities_are_those_of_temperature_1(path: str) -> None:
    config = config_for(path)
    actor = local_group(ActorWorker, config)
    group = replicas(config, actor.export_weights(version=0).get(), size=1)
    (drawn,) = engine_check.draw(group, FirstPrompts())
    hf = group.workers[0].rollout.model
    columns = rows_of(drawn, "responses"), rows_of(drawn, "rollout_log_probs")
    for prompt, tokens, log_probs in zip(FirstPrompts.rows, *columns, strict=True):
        text = torch.tensor([[*prompt, *tokens]])
        of_text = hf(text).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert of_text.argmax(-1).tolist() == tokens
        torch.testing.assert_close(
            torch.tensor(log_probs), of_text.max(-1).values, rtol=0, atol=1e-5
        )


def test_what_is_in_flight_goes_on_and_nothing_of_the_comparison_stays(path: str) -> None:
    config = config_for(path)
    actor = local_group(ActorWorker, config)
    exports = actor.export_weights(version=0).get()
    prompts = FirstPrompts().collate([[5, 6]], epoch=3)
    prompts.meta_info = {"global_steps": 2}

    def responses(compares: bool) -> DataProto:
        group = replicas(config, exports, size=1)
        thread = group.workers[0].engine_thread
        steps = StepByStep(thread)
        generation = group.generate_sequences.remote(prompts)
        steps.wait_for(2)
        steps.advance(1)
        if compares:
            with ThreadPoolExecutor() as pool:
                drawing = pool.submit(engine_check.draw, group, FirstPrompts())
                steps.wait_for(3)
                assert len(thread.ages()) == 5
                steps.advance(8)
                drawing.result(timeout=60)
        steps.advance(8)
        batch = generation.get(timeout=60)
        assert thread.engine._batches == [] and not thread._ended and not thread.ages()
        return batch

    compared, alone = responses(True), responses(False)
    for name in ("responses", "rollout_log_probs", "response_mask"):
        assert rows_of(compared, name) == rows_of(alone, name)


def difference_of(config: ActorRolloutRefConfig, value: list[float]) -> None:
    own = torch.tensor(value)
    engine_check.require_close(
        run_config(config), "it", own, torch.zeros_like(own), config.rollout.quantization
    )


@pytest.mark.parametrize(
    ("dtype", "quantization", "right", "wrong"),
    [
        ("float32", None, [9e-4, -9e-4], [0.0, 1.1e-3]),
        ("bfloat16", None, [0.09, 0.0], [-0.08, 0.03]),  # means 0.045 and 0.055
        ("bfloat16", "fp8_per_channel", [0.3, -0.09], [0.3, 0.11]),  # 0.195 and 0.205
        ("float32", None, [0.0], [float("nan")]),
    ],
)
def test_the_limits_are_those_of_the_data_types(
    path: str, dtype: str, quantization: str | None, right: list[float], wrong: list[float]
) -> None:
    config = config_for(path, dtype)
    rollout = config.rollout.model_copy(update={"quantization": quantization})
    config = config.model_copy(update={"rollout": rollout})
    difference_of(config, right)
    with pytest.raises(EngineMismatch, match="it does not compute"):
        difference_of(config, wrong)


def test_one_side_in_bfloat16_is_enough_for_its_limit(path: str) -> None:
    config = config_for(path)
    rollout = config.rollout.model_copy(update={"dtype": "bfloat16"})
    difference_of(config.model_copy(update={"rollout": rollout}), [0.04, 0.04])


def test_a_maker_compares_its_replicas_and_its_copy_with_the_first_trainers_actor(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(path)
    actor = local_group(ActorWorker, config)
    exports = actor.export_weights(version=0).get()
    trainers_version = 1
    asked = []

    def score_greedy(
        name: str, method: str, own: str, version: int, drawn: Any, timeout: float
    ) -> Any:
        asked.append((name, method, own, version))
        return engine_check.log_probs_of(actor, drawn) if version == trainers_version else None

    copy = local_group(ActorCopyWorker, config)
    groups = {"rollout": replicas(config, exports), "actor": copy}
    own = {
        "name": "maker_1",
        "trainer_names": ["trainer_0", "trainer_1"],
        "recorder": SideRecorder("maker_1"),
    }
    whole = config_of("algorithm.adv_estimator=grpo").model_copy(
        update={"actor_rollout_ref": config}
    )
    run = SimpleNamespace(groups=groups, train_dataset=FirstPrompts())
    holder = maker(config=whole, run=run, version=0, is_compared=False, **own)
    # Ray wraps the methods of an actor, and after a run in this process they may have globals of
    # their own.
    wrapped = inspect.getclosurevars(type(holder).compare_engines).nonlocals["method"]
    monkeypatch.setitem(wrapped.__globals__, "ask", score_greedy)
    holder.compare_engines()
    assert not holder.is_compared  # the trainer has other weights
    holder.version = 1
    holder.compare_engines()
    assert holder.is_compared and asked[-1] == ("trainer_0", "score_greedy", "maker_1", 1)
    copy.workers[0].engine.model.hf.model.norm.variance_epsilon = 0.3
    fingerprints = [
        fingerprint_tensor(p.to_local()) for _, p in copy.workers[0].engine.named_parameters()
    ]
    assert fingerprints == [
        fingerprint_tensor(p.to_local()) for _, p in actor.workers[0].engine.named_parameters()
    ]
    with pytest.raises(EngineMismatch, match="the copy of the actor of maker_1 does not compute"):
        holder.compare_engines()


def test_the_first_step_waits_for_all_makers_and_a_later_one_for_those_that_found_other_weights() -> (
    None
):
    turn = Comparisons("trainer_0", ["maker_0", "maker_1"], limit_s=60)
    assert turn.score("maker_0", lambda: True, lambda: "scores") == "scores"
    assert turn.score("maker_1", lambda: False, lambda: "scores") is None
    begun: list[Any] = []
    step = threading.Thread(target=lambda: begun.append(turn.begin_step()), daemon=True)
    step.start()
    time.sleep(0.1)
    assert not begun
    assert turn.score("maker_1", lambda: True, lambda: "scores") == "scores"
    step.join(60)
    assert begun == [[]] and turn.in_step
    assert turn.score("maker_0", lambda: True, lambda: "scores") is None  # the weights change
    assert turn.awaited == {"maker_0"}


def test_a_maker_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Comparisons("trainer_0", ["maker_0", "maker_1"], limit_s=0.05)
    turn.score("maker_0", lambda: True, lambda: None)
    with pytest.raises(CallTimeout, match="waiting for the engines of maker_1 to be compared"):
        turn.begin_step()
    monkeypatch.setattr(comparisons, "LATE_S", 0.05)
    turn = Comparisons("trainer_0", [], limit_s=60)
    assert turn.begin_step() == []
    turn.score("maker_0", lambda: True, lambda: None)
    turn.in_step = False
    assert turn.begin_step() == [
        "after its restart the engines of maker_0 were not compared within 0.05 s"
    ]
    turn.in_step = False
    assert turn.begin_step() == []  # it is not waited for again
