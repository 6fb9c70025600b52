"""From responses to scores: which rows a rule scores, with what it is called, and where the result
lands."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from verl_like.protocol import DataProto, Metric, metric_values
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.rewards.manager import RewardError, RewardFunctionSpec, RewardManager
from verl_like.single_controller import CallEvent
from verl_like.trainer.ppo.scoring import (
    PendingScores,
    RuleScorer,
    _merged,
    groups_differ,
    reward_means,
    scores_by_reward,
)
from verl_like.workers.rollout import Completion, FinishedRequest, GenerationRequest, Sampling

# Says what it was called with; "x" has no score, "y" fails.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "x":
        return None
    if solution_str == "y":
        raise RuntimeError("no")
    said = f"{data_source} {solution_str} {ground_truth} {extra_info['index']}"
    return {"score": float(solution_str), "said": said, "length": len(solution_str)}
"""


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardManager]:
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    manager = RewardManager(RewardFunctionSpec(str(path)), num_workers=2, on_error="skip")
    yield manager
    manager.close()


@pytest.fixture
def scorer(manager: RewardManager, tiny_llama: Callable) -> RuleScorer:
    path, _ = tiny_llama()
    return RuleScorer(manager, AutoTokenizer.from_pretrained(path), scores_every_row=False)


def prompts() -> DataProto:
    """Three prompts, of which the reward model alone judges the second."""
    styles = ["rule", "model", "rule"]
    return DataProto.from_dict(
        tensors={"prompts": jagged_from_lists([[2], [3, 3], [4]], torch.int64)},
        non_tensors={
            "uid": np.array(["a", "b", "c"], dtype=object),
            "data_source": np.array(["from a", "from b", "from c"], dtype=object),
            "reward_model": np.array(
                [{"style": s, "ground_truth": str(i)} for i, s in enumerate(styles)], dtype=object
            ),
            "extra_info": np.array([{"index": 10 * i} for i in range(3)], dtype=object),
            "raw_prompt": np.array([{"role": "user", "content": "1+1"}] * 3, dtype=object),
        },
    )


def generated(scorer: RuleScorer, texts: list[str]) -> DataProto:
    """A batch of these responses, each with end of sequence, R = 4."""
    token_ids = [
        scorer.tokenizer(text, add_special_tokens=False)["input_ids"] + [1] for text in texts
    ]
    responses = jagged_from_lists(token_ids, torch.int64)
    columns = {
        "prompts": jagged_from_lists([[2]] * len(texts), torch.int64),
        "responses": responses,
    }
    return DataProto.from_dict(
        {**columns, "response_mask": torch.ones_like(responses)}, meta_info={"padding": (2, 4, 0)}
    )


def finished(uid: str, index: int, token_ids: np.ndarray) -> FinishedRequest:
    """As it comes to the driver."""
    sampling = Sampling(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=4, stop_token_ids=(1,))
    request = GenerationRequest(
        f"{uid}, {index}", [2], seed=3, sampling=sampling, uid=uid, index=index
    )
    return request, Completion(
        token_ids, np.full(len(token_ids), -0.5, np.float32), ((0, 0, len(token_ids)),)
    )


def test_scores_and_what_the_function_adds_land_on_their_rows(scorer: RuleScorer):
    texts = ["1", "22", "5", "6", "x", "333"]  # two responses to each prompt
    batch = generated(scorer, texts)
    events: list[CallEvent] = []
    scorer.on_call = events.append
    pending = PendingScores(scorer, prompts(), num_samples=2)
    # The second response to a and the first to c are told early; b is not a rule's.
    told = [("c", 0, 4), ("b", 1, 3), ("a", 1, 1)]
    pending.add(
        [finished(uid, index, batch.batch["responses"][row].numpy()) for uid, index, row in told]
    )
    result = pending.complete(batch).get()
    expected = torch.zeros(6, 4)
    expected[0, 1], expected[1, 2], expected[5, 3] = 1.0, 22.0, 333.0  # at the end of sequence
    scores = padded(batch.union(result)).batch["rule_scores"]
    assert (
        torch.equal(scores, expected)
        and scores.dtype == result.batch["rule_scores"].dtype == torch.float32
    )
    assert [len(row) for row in result.batch["rule_scores"].unbind()] == [2, 3, 2, 2, 2, 4]
    assert result.batch["is_skipped"].tolist() == [False, False, False, False, True, False]
    said = ["from a 1 0 0", "from a 22 0 0", None, None, None, "from c 333 2 20"]
    assert result.non_tensor_batch["reward_extra/said"].tolist() == said
    lengths = result.non_tensor_batch["reward_extra/length"]
    assert np.array_equal(lengths, [1, 2, np.nan, np.nan, np.nan, 3], equal_nan=True)
    assert metric_values(result.meta_info["metrics"]) == {
        "reward/early_ratio": 2 / 4,
        "reward/num_skipped": 1,
        "reward/num_errors": 0,
        "reward/num_timeouts": 0,
    }
    assert {event.role for event in events} == {"rules"} and all(
        event.started < event.finished for event in events
    )


def test_an_error_of_the_reward_function_names_the_prompt_by_its_uid(
    scorer: RuleScorer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scorer.manager, "on_error", "fail")
    batch = generated(scorer, ["1", "2", "y"])
    pending = PendingScores(scorer, prompts(), num_samples=1).complete(batch)
    with pytest.raises(RewardError, match=r"sample uid 'c' \(data_source 'from c'\) failed"):
        pending.get()


def test_an_episode_that_failed_is_not_scored(scorer: RuleScorer, monkeypatch: pytest.MonkeyPatch):
    """The function raises an error for an empty text."""
    monkeypatch.setattr(scorer.manager, "on_error", "fail")
    batch = generated(scorer, ["1", "2", "333"])
    mask = batch.batch["response_mask"]
    mask.values()[:2] = 0
    batch.batch["is_left_out"] = torch.tensor([True, False, False])
    result = PendingScores(scorer, prompts(), num_samples=1).complete(batch).get()
    assert result.batch["is_skipped"].tolist() == [True, False, False]
    scores = [row.sum().item() for row in result.batch["rule_scores"].unbind()]
    assert scores == [0.0, 0.0, 333.0], "the second is left to a model"
    assert result.meta_info["metrics"]["reward/num_errors"].value == 0


def test_the_check_before_a_run_gives_the_function_all_that_a_row_has(
    tmp_path: Path, scorer: RuleScorer
):
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, raw_prompt):\n"
        "    said = [data_source, solution_str, ground_truth, extra_info['index'], "
        "raw_prompt[0]['content']]\n"
        "    return {'score': 1.0, ' '.join(map(str, said)): 1.0}\n"
    )
    columns = {"raw_prompt": [{"role": "user", "content": "1+1"}], "extra_info": {"index": 7}}
    row = {
        "index": 0,
        "data_source": "from a",
        "reward_model": {"style": "rule", "ground_truth": 31},
        **columns,
    }
    manager = RewardManager(RewardFunctionSpec(str(path)), num_workers=1)
    names = RuleScorer(manager, scorer.tokenizer, scores_every_row=False).check([row])
    manager.close()
    assert names == ["from a 31 31 7 1+1"]


def test_a_number_of_other_data_sources_is_missing_in_a_batch_and_ends_no_run(scorer: RuleScorer):
    columns = {"raw_prompt": [{"role": "user", "content": "1+1"}], "extra_info": {"index": 7}}
    truth = {"style": "rule", "ground_truth": "31"}
    row = {"index": 0, "data_source": "from a", "reward_model": truth, **columns}
    assert scorer.check([row]) == ["length"]
    batch = generated(scorer, ["x", "5", "x"])  # the rules skip both of theirs
    batch = batch.union(PendingScores(scorer, prompts(), num_samples=1).complete(batch).get())
    assert np.isnan(batch.non_tensor_batch["reward_extra/length"]).tolist() == [True] * 3
    batch.non_tensor_batch["uid"] = np.array(["a", "a", "a"], dtype=object)
    assert groups_differ(batch, "length").tolist() == [False] * 3
    assert scores_by_reward(padded(batch), {})["length"].isnan().any(-1).all()
    assert reward_means(padded(batch), {}) == {}


def test_a_failure_is_counted_and_a_function_of_ones_own_scores_every_row(scorer: RuleScorer):
    scorer.scores_every_row = True
    result = (
        PendingScores(scorer, prompts(), num_samples=1)
        .complete(generated(scorer, ["1", "2", "y"]))
        .get()
    )
    assert [row.sum().item() for row in result.batch["rule_scores"].unbind()] == [1.0, 2.0, 0.0]
    metrics = metric_values(result.meta_info["metrics"])
    assert (
        metrics["reward/num_skipped"],
        metrics["reward/num_errors"],
        metrics["reward/early_ratio"],
    ) == (1, 1, 0)


def test_a_batch_without_a_row_for_a_rule_has_the_columns_all_the_same(scorer: RuleScorer):
    asked = prompts()
    for spec in asked.non_tensor_batch["reward_model"]:
        spec["style"] = "model"
    result = (
        PendingScores(scorer, asked, num_samples=1)
        .complete(generated(scorer, ["1", "x", "y"]))
        .get()
    )
    assert [row.tolist() for row in result.batch["rule_scores"].unbind()] == [[0.0, 0.0]] * 3
    assert result.batch["is_skipped"].tolist() == [False] * 3
    assert result.non_tensor_batch == {}
    assert result.meta_info["metrics"]["reward/early_ratio"] == Metric.mean(0.0, weight=0)


def test_each_reward_process_is_a_rank_of_the_timeline(scorer: RuleScorer):
    events: list[CallEvent] = []
    scorer.on_call = events.append
    scorer.report([(70, 1.0, 2.0), (50, 1.5, 3.0), (70, 2.005, 4.0), (70, 5.0, 6.0)])
    scorer.report([(90, 7.0, 8.0), (50, 7.0, 9.0)])
    assert events == [
        CallEvent("driver", "rules", "score", 0, 1.5, 3.0),
        CallEvent("driver", "rules", "score", 1, 1.0, 4.0),
        CallEvent("driver", "rules", "score", 1, 5.0, 6.0),
        CallEvent("driver", "rules", "score", 0, 7.0, 9.0),
        CallEvent("driver", "rules", "score", 2, 7.0, 8.0),
    ]


def test_spans_of_a_process_less_than_10_ms_apart_are_one():
    assert _merged([(1, 0.0, 1.0), (1, 1.009, 2.0), (1, 2.011, 3.0)]) == [
        (1, 0.0, 2.0),
        (1, 2.011, 3.0),
    ]
    assert _merged([(2, 0.0, 1.0), (1, 1.0, 2.0)]) == [(1, 1.0, 2.0), (2, 0.0, 1.0)]
