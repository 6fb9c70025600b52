"""The reward manager with real worker processes and reward functions that go wrong in every way."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from reward_processes import sample

from verl_like.rewards.manager import (
    RewardError,
    RewardFunctionSpec,
    RewardManager,
    RewardResult,
    RewardSample,
)
from verl_like.rewards.process import Answer


@pytest.fixture(scope="module")
def skipping(reward_file: str) -> Iterator[RewardManager]:
    manager = RewardManager(
        RewardFunctionSpec(reward_file), num_workers=2, timeout_s=3.0, on_error="skip"
    )
    yield manager
    manager.close()


@pytest.fixture(scope="module")
def failing(reward_file: str) -> Iterator[RewardManager]:
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=1, timeout_s=3.0)
    yield manager
    manager.close()


def test_scores_and_extra_metrics_come_back_in_order(skipping: RewardManager) -> None:
    samples = [sample("x" * (index % 5), index, ground_truth=str(index)) for index in range(256)]
    result = skipping.submit(samples).get()
    assert result.scores.dtype == np.float32
    np.testing.assert_array_equal(result.scores, np.arange(256))
    np.testing.assert_array_equal(result.extra["length"], np.arange(256) % 5)
    assert list(result.extra["said"][:3]) == ["", "x", "xx"]
    assert not result.skipped.any() and (result.num_errors, result.num_timeouts) == (0, 0)


def test_workers_load_neither_torch_nor_the_main_module_of_the_driver(
    reward_file: str, tmp_path: Path
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from verl_like.rewards.manager import RewardFunctionSpec, RewardManager, RewardSample
        if __name__ == "__main__":
            manager = RewardManager(RewardFunctionSpec({reward_file!r}), num_workers=1)
            print(manager.submit([RewardSample("0-0", "x", "fine", "1")]).get().extra["loaded"].tolist())
            manager.close()
        """)
    )
    driver = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert (driver.stdout, driver.stderr) == ("['']\n", "")


def test_reward_kwargs_and_async_functions(reward_file: str) -> None:
    manager = RewardManager(
        RewardFunctionSpec(reward_file, reward_kwargs={"bonus": 0.5}), num_workers=1
    )
    assert manager.submit([sample("fine")]).get().scores.tolist() == [1.5]
    manager.close()
    manager = RewardManager(RewardFunctionSpec(reward_file, "compute_async"), num_workers=1)
    assert manager.submit([sample("fine", index) for index in range(5)]).get().scores.tolist() == [
        0.5,
        1.5,
        2.5,
        3.5,
        4.5,
    ]
    manager.close()


def test_a_function_is_called_with_the_values_of_a_sample_and_with_nothing_else(
    tmp_path: Path,
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "def few(**arguments):\n"
        "    return {'score': 1.0, 'arguments': arguments}\n"
        "def all(raw_prompt, **arguments):\n"
        "    return {'score': 1.0, 'arguments': arguments | {'raw_prompt': raw_prompt}}\n"
    )
    prompt = [{"role": "user", "content": "1+1"}]
    values = {
        "data_source": "a",
        "solution_str": "b",
        "ground_truth": ["2"],
        "extra_info": {"index": 7},
    }
    scored = RewardSample("row 7", raw_prompt=prompt, **values)
    for name, further in [("few", {}), ("all", {"raw_prompt": prompt})]:
        manager = RewardManager(RewardFunctionSpec(str(file), name), num_workers=1)
        result = manager.submit([scored]).get()
        manager.close()
        assert result.extra["arguments"].tolist() == [values | further]


def test_a_sample_with_further_fields_is_refused_by_where_to_put_them(
    skipping: RewardManager,
) -> None:
    @dataclass(frozen=True)
    class WithHint(RewardSample):
        hint: str = "h"

    with pytest.raises(
        ValueError, match=r"WithHint is no RewardSample, .*: put further ones into its extra_info"
    ):
        skipping.submit([WithHint("row 1", "source", "4", "4")])


def test_a_callable_object_is_a_reward_function(reward_file: str) -> None:
    manager = RewardManager(RewardFunctionSpec(reward_file, "judge"), num_workers=1)
    assert manager.submit([sample("four")]).get().scores.tolist() == [0.25]
    with pytest.raises(
        RewardError, match=r"ZeroDivisionError: division by zero\n  at .*my_reward.py:9 in inner"
    ):
        manager.submit([sample("")]).get()
    manager.close()


def test_the_default_function_scores_by_data_source_and_names_an_unknown_one() -> None:
    manager = RewardManager(RewardFunctionSpec(), num_workers=1)
    right = RewardSample("0-0", "openai/gsm8k", "so #### 72", "72")
    assert manager.submit([right]).get().scores.tolist() == [1.0]
    with pytest.raises(
        RewardError, match=r"reward of row 1 \(data_source 'unheard/of'\).*no reward is registered"
    ) as error:
        manager.submit([RewardSample("row 1", "unheard/of", "so #### 72", "72")]).get()
    assert "\n  at " not in str(error.value)  # no reward was called, so there is no place in it
    manager.close()


def test_submit_returns_at_once(failing: RewardManager) -> None:
    pending = failing.submit([sample("sleep 1")])
    ((_, future),) = pending._submitted.values()
    assert not future.done()
    assert pending.get().scores.tolist() == [1.0]
    assert future.done() and pending.get().scores.tolist() == [1.0]


def test_the_deadline_of_a_batch_is_a_named_error_that_a_run_reports(
    failing: RewardManager,
) -> None:
    pending = failing.submit([sample("sleep 1", 4), sample("fine", 5)])
    assert pending._longest_s > 2 * failing.timeout_s  # both may hang
    pending._longest_s = 0.05
    with pytest.raises(
        RewardError,
        match=r"2 of 2 samples were not scored within 0 s, the first is sample uid '0-4'",
    ):
        pending.get()
    pending._longest_s = 60
    assert pending.get().scores.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "cause", ["divide", "own error", "leave", "exit 3", "segfault", "return nan", "return text"]
)
def test_a_failing_sample_is_skipped_and_the_others_are_scored(
    skipping: RewardManager, cause: str
) -> None:
    result = skipping.submit([sample("a"), sample(cause), sample("b")]).get()
    assert result.skipped.tolist() == [False, True, False]
    assert result.scores.tolist() == [1.0, 0.0, 1.0]
    assert (
        np.isnan(result.extra["length"]).tolist() == [False, True, False]
        and result.extra["said"][1] is None
    )
    assert (result.num_errors, result.num_timeouts) == (1, 0)


@pytest.mark.parametrize(("cause", "counts"), [("hang", (0, 1)), ("exit 0", (1, 0))])
def test_a_sample_without_an_answer_costs_only_its_own_worker(
    skipping: RewardManager, cause: str, counts: tuple[int, int]
) -> None:
    samples = [sample("a", index) for index in range(64)]
    samples[10] = sample(cause, 10)
    result = skipping.submit(samples).get()
    assert np.flatnonzero(result.skipped).tolist() == [10]
    assert (result.num_errors, result.num_timeouts) == counts
    assert skipping.submit(samples[:10]).get().scores.tolist() == [1.0] * 10


def test_on_error_score_scores_a_failed_sample_0(reward_file: str) -> None:
    manager = RewardManager(RewardFunctionSpec(reward_file), timeout_s=3.0, on_error="score")
    result = manager.submit(
        [sample("divide"), sample("hang"), sample("return none"), sample("a")]
    ).get()
    manager.close()
    assert result.scores.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert result.skipped.tolist() == [False, False, True, False]
    assert (result.num_errors, result.num_timeouts) == (1, 1)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            "divide",
            [
                "ZeroDivisionError: division by zero",
                "in inner: return 1 / number",
                "my_reward.py:9",
            ],
        ),
        ("own error", ["OwnError: this and that"]),
        ("leave", ["SystemExit: 0"]),
        ("hang", ["no answer within reward.timeout_s=3 s"]),
        ("exit 3", ["its worker process is gone: it died with exit code 3"]),
        ("segfault", [f"it died with exit code {-signal.SIGSEGV}"]),
        ("return nan", ["the function returned nan (nan), expected a finite number"]),
        ("return inf", ["the function returned inf"]),
        ("return huge", ["the function returned 1e+39"]),
        ("return text", ["the function returned a str ('1.0')"]),
        ("return list", ["the function returned a list ([1.0])"]),
        ("return array", ["the function returned a ndarray"]),
        ("return no score", ["a dict without the key 'score' ({'acc': 1.0})"]),
        ("return nan score", ["the function returned nan ({'score': nan})"]),
        ("return odd extra", ["extra 'thing' of type set, which is no JSON value"]),
        ("return inf extra", ["extra 'acc' is inf"]),
        ("return none inf", ["extra 'acc' is inf"]),
        ("return inf inside", ["extra 'all' of type list, which is no JSON value"]),
        ("return large extra", ["OverflowError"]),
        ("return long extra", ["extra metrics of more than 65536 bytes"]),
        ("return long key", ["extra metrics of more than 65536 bytes"]),
        ("return half extra", ["extra 'said' of type str, which is no JSON value"]),
        ("raise half", ["ValueError: a \\ud800 b"]),
        (
            "write bytes",
            [
                "its worker process is gone: it sent what is no answer, b'\\xff\\xfe', and was "
                "stopped"
            ],
        ),
        ("write list", ["it sent what is no answer, b'[1]'"]),
        ("write deep", ["it sent what is no answer, b'[[[[["]),
        ("write key", ["it sent what is no answer, {'score': 1.0, 'more': 2}"]),
        ("write text", ["it sent what is no answer, {'score': '1'"]),
        ("write true", ["it sent what is no answer, {'score': True"]),
        ("write no time", ["it sent what is no answer, {'score': 7.0}"]),
        ("write null time", ["it sent what is no answer, {'score': 7.0, 'ran': None}"]),
        ("write short time", ["it sent what is no answer, {'score': 7.0, 'ran': [1, 2]}"]),
        ("write odd process", ["it sent what is no answer, {'score': 7.0, 'ran': [nan, 2, 3]}"]),
    ],
)
def test_on_error_fail_names_the_sample_the_cause_and_the_way_out(
    failing: RewardManager, cause: str, words: list[str]
) -> None:
    pending = failing.submit([sample("a", 0), sample(cause, 7)])
    with pytest.raises(RewardError) as error:
        pending.get()
    fixes = ["reward.on_error=skip", "reward.on_error=score"]
    for word in ["uid '0-7'", "data_source 'test/source'", *words, *fixes]:
        assert word in str(error.value)
    with pytest.raises(RewardError, match="uid '0-7'"):
        pending.get()


@pytest.mark.parametrize(
    ("returned", "score", "skipped"),
    [
        ("true", 1.0, False),
        ("int", 3.0, False),
        ("float32", 0.5, False),
        ("none", 0.0, True),
        ("none score", 0.0, True),
    ],
)
def test_results_that_are_accepted(
    failing: RewardManager, returned: str, score: float, skipped: bool
) -> None:
    result = failing.submit([sample(f"return {returned}")]).get()
    assert (result.scores.tolist(), result.skipped.tolist()) == ([score], [skipped])
    assert result.num_errors == 0


def test_a_result_is_what_its_answers_come_to() -> None:
    result = RewardResult(
        [
            Answer(score=0.1, extra={"length": 3, "right": True}, ran=(70, 1.0, 2.0)),
            Answer(extra={"said": "x"}, ran=(50, 1.5, 3.0)),
            Answer(error="it raised", ran=(70, 2.0, 2.5)),
            Answer(score=0.0, error="it raised a TimeoutError", timed_out=True, ran=(50, 3.0, 4.0)),
            Answer(error="it hung", timed_out=True),
            Answer(score=2, extra={"length": None, "said": None}, ran=(70, 4.0, 5.0)),
        ]
    )
    assert result.scores.dtype == np.float32
    assert result.scores.tolist() == [np.float32(0.1), 0.0, 0.0, 0.0, 0.0, 2.0]
    assert result.skipped.tolist() == [False, True, True, False, True, False]
    assert list(result.extra) == ["length", "right", "said"]
    np.testing.assert_array_equal(result.extra["length"], [3] + [np.nan] * 5)
    np.testing.assert_array_equal(result.extra["right"], [1] + [np.nan] * 5)
    assert result.extra["said"].tolist() == [None, "x", None, None, None, None]
    assert [values.dtype for values in result.extra.values()] == [np.float64, np.float64, object]
    assert (result.num_errors, result.num_timeouts) == (1, 2)
    assert result.ran == [
        (70, 1.0, 2.0),
        (50, 1.5, 3.0),
        (70, 2.0, 2.5),
        (50, 3.0, 4.0),
        (70, 4.0, 5.0),
    ]
    assert [result.extra[name] is result.extra[name] for name in result.extra] == [True] * 3, (
        "each is made once"
    )


def test_no_answers_come_to_empty_columns() -> None:
    result = RewardResult([])
    assert (result.scores.shape, result.scores.dtype) == ((0,), np.float32)
    assert (result.skipped.shape, result.skipped.dtype, result.extra) == ((0,), np.bool_, {})


@pytest.mark.parametrize("manager_name", ["failing", "skipping"])
def test_a_check_refuses_every_sample_that_fails_or_warns_where_the_run_would_skip_it(
    manager_name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    manager = request.getfixturevalue(manager_name)
    manager.check([sample("fine"), sample("return none")])
    assert not caplog.messages
    samples = [sample("divide", 3), sample("fine", 4), sample("return text", 5)]
    if manager_name == "failing":
        with pytest.raises(RewardError) as error:
            manager.check(samples)
        text = str(error.value)
    else:
        manager.check(samples)
        (text,) = caplog.messages
    for word in [
        "failed for 2 of 3",
        "uid '0-3'",
        "ZeroDivisionError",
        "uid '0-5'",
        "the function returned a str",
    ]:
        assert word in text


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def score(): pass", "compute_score", "has no function 'compute_score'"),
        (
            "import no_such_module",
            "compute_score",
            "fails on import: ModuleNotFoundError: No module named 'no_such_mod",
        ),
        ("def broken(:", "compute_score", "fails on import: SyntaxError"),
        ("import os; os._exit(7)", "compute_score", "did not survive loading it"),
        (
            "import ctypes; ctypes.string_at(0)",
            "compute_score",
            r"loading it \(it died with exit code -11\)",
        ),
        # The child has the socket too, so its end alone would not be seen.
        (
            "import os, time\nif os.fork() == 0: time.sleep(600)\nos._exit(8)",
            "compute_score",
            r"loading it \(it died with exit code 8\)",
        ),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_once(
    tmp_path: Path, source: str, name: str, message: str
) -> None:
    file = tmp_path / "bad_reward.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=message):
        RewardManager(RewardFunctionSpec(str(file), name), num_workers=1)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"reward.num_workers=0 must be at least 1, and .*=30.0 above 0"
    ):
        RewardManager(RewardFunctionSpec(), num_workers=0)


def test_a_missing_number_may_be_nan(failing: RewardManager) -> None:
    result = failing.submit([sample("return nan extra"), sample("a")]).get()
    assert np.isnan(result.extra["length"]).tolist() == [True, False]


def test_a_long_error_loses_its_middle(failing: RewardManager) -> None:
    with pytest.raises(RewardError, match=r"xxx \.\.\. xxx") as error:
        failing.submit([sample("raise long")]).get()
    assert (
        len(str(error.value)) < 4_500
        and "ValueError: xxx" in str(error.value)
        and "the end" in str(error.value)
    )


def test_an_answer_that_a_function_sends_itself_is_not_taken_for_that_of_another_sample(
    skipping: RewardManager,
) -> None:
    samples = [sample("a", index, ground_truth=str(index)) for index in range(20)]
    samples[3] = sample("write early", 3, ground_truth="3")
    scores = skipping.submit(samples).get().scores.tolist()
    assert scores == [0, 1, 2, 7, *range(4, 20)]  # its own is what the function says, as always


def test_samples_may_come_one_by_one_in_any_order(failing: RewardManager):
    pending = failing.expect(3)
    pending.submit(2, sample("c", 2, ground_truth="30"))
    assert pending.missing() == [0, 1]
    pending.submit(0, sample("a", 0, ground_truth="10"))
    pending.submit(1, sample("b", 1, ground_truth="20"))
    result = pending.get()
    assert result.scores.tolist() == [10, 20, 30] and result.extra["said"].tolist() == [
        "a",
        "b",
        "c",
    ]
    pids, starts, ends = zip(*result.ran, strict=True)
    assert len(set(pids)) == 1 and all(
        start <= end for start, end in zip(starts, ends, strict=True)
    )
    # One process, in the order in which they came
    assert ends[2] <= starts[0] and ends[0] <= starts[1]


def test_of_samples_that_come_in_any_order_the_first_one_that_fails_is_named(
    failing: RewardManager,
):
    pending = failing.expect(2)
    pending.submit(1, sample("own error", 1))
    pending.submit(0, sample("divide", 0))
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        pending.get()
