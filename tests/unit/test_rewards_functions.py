"""The built-in rewards, their registry, and the loader of custom ones."""

import asyncio
import re
from pathlib import Path

import pytest

from verl_like.rewards import exact_match, get_reward_fn, gsm8k, register_reward
from verl_like.rewards.loader import RewardFunctionSpec, load_reward_function


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("48 / 2 = 24, so 48 + 24 = 72\n#### 72", "72", "72"),
        ("It costs $1,234.50.\n#### 1,234.50", "1234.50", "1234.50"),
        ("#### -3", "-3", "-3"),
        ("first #### 1 then #### 2", "2", "2"),
        ("The answer is 72.", None, "72"),
        ("#### 72.", "72", "72"),
        ("####72", None, "72"),
        ("#### seventy two", None, None),
        ("", None, None),
    ],
)
def test_gsm8k_extracts_the_last_answer(
    response: str, strict: str | None, flexible: str | None
) -> None:
    assert gsm8k.extract_solution(response, "strict") == strict
    assert gsm8k.extract_solution(response, "flexible") == flexible


def test_gsm8k_scores_right_wrong_and_missing_answers() -> None:
    assert gsm8k.compute_score("openai/gsm8k", "#### 1,000", "1000") == 1.0
    assert gsm8k.compute_score("openai/gsm8k", "#### 999", "1000", format_score=0.1) == 0.1
    assert gsm8k.compute_score("openai/gsm8k", "1000", "1000", format_score=0.1) == 0.0
    assert gsm8k.compute_score("openai/gsm8k", "1000", "1000", method="flexible", score=2.0) == 2.0


def test_gsm8k_looks_at_the_end_of_a_long_response_only() -> None:
    assert gsm8k.compute_score("openai/gsm8k", "#### 72" + " and on" * 100, "72") == 0.0
    assert gsm8k.compute_score("openai/gsm8k", "on and " * 100 + "#### 72", "72") == 1.0


def test_gsm8k_refuses_an_unknown_method() -> None:
    with pytest.raises(ValueError, match="method is 'loose', expected 'strict' or 'flexible'"):
        gsm8k.extract_solution("#### 1", "loose")


def test_exact_match_ignores_surrounding_white_space_only() -> None:
    assert exact_match.compute_score("exact_match", " yes\n", "yes") == 1.0
    assert exact_match.compute_score("exact_match", "yes!", "yes") == 0.0
    assert exact_match.compute_score("exact_match", "b", ["a", "b"]) == 1.0
    assert exact_match.compute_score("exact_match", "7", 7) == 1.0


def test_the_registry_finds_names_before_patterns_and_lists_what_it_knows() -> None:
    @register_reward("test_registry/*")
    def by_pattern(**sample: object) -> float:
        return 0.0

    @register_reward("test_registry/exact")
    def by_name(**sample: object) -> float:
        return 0.0

    assert get_reward_fn("test_registry/any") is by_pattern
    assert get_reward_fn("test_registry/exact") is by_name
    assert get_reward_fn("openai/gsm8k") is gsm8k.compute_score
    with pytest.raises(
        ValueError, match=r"'unheard/of' \(registered: .*openai/gsm8k.*custom_reward_function.path"
    ):
        get_reward_fn("unheard/of")
    with pytest.raises(
        ValueError,
        match=r"data source 'openai/gsm8k' has the reward verl_like.rewards.gsm8k already",
    ):
        register_reward("openai/gsm8k")(by_name)


def test_the_default_reward_function_goes_by_data_source_and_binds_reward_kwargs() -> None:
    reward_fn = load_reward_function(RewardFunctionSpec(reward_kwargs={"format_score": 0.25}))
    sample = {"solution_str": "#### 1", "ground_truth": "2", "extra_info": {}}
    assert reward_fn(data_source="openai/gsm8k", **sample) == 0.25


def test_a_custom_function_is_loaded_from_a_file_or_a_module_with_its_kwargs(
    tmp_path: Path,
) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(
        "async def scaled(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):\n"
        "    return scale * len(solution_str)\n"
    )
    reward_fn = load_reward_function(RewardFunctionSpec(str(file), "scaled", {"scale": 0.5}))
    score = asyncio.run(
        reward_fn(data_source="x", solution_str="four", ground_truth="", extra_info=None)
    )
    assert score == 2.0
    from_package = load_reward_function(RewardFunctionSpec("pkg://verl_like.rewards.gsm8k"))
    assert from_package.func is gsm8k.compute_score


@pytest.mark.parametrize(
    ("path", "name", "reward_kwargs", "message"),
    [
        (
            "absent.py",
            "compute_score",
            {},
            "custom_reward_function.path=.*absent.py: there is no file",
        ),
        ("pkg://no_such_module", "compute_score", {}, "cannot be imported .*PYTHONPATH"),
        (
            "reward.py",
            "compute",
            {},
            r"has no function 'compute' \(it has: compute_score, two_arguments\)",
        ),
        (
            "reward.py",
            "two_arguments",
            {},
            "cannot be called as a reward function .*takes data_source, solution_str",
        ),
        ("reward.py", "compute_score", {"sclae": 2}, r"cannot be called .*sclae"),
        ("reward.txt", "compute_score", {}, "not a Python file"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(
    tmp_path: Path, path: str, name: str, reward_kwargs: dict[str, int], message: str
) -> None:
    for file in ("reward.py", "reward.txt"):
        (tmp_path / file).write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1): "
            "return 1.0\n"
            "def two_arguments(prompt, response): return 1.0\n"
        )
    location = path if path.startswith("pkg://") else str(tmp_path / path)
    with pytest.raises(ValueError) as error:
        load_reward_function(RewardFunctionSpec(location, name, reward_kwargs))
    assert re.search(message, str(error.value))
