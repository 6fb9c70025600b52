"""The examples of docs/extending.md, docs/algorithms.md and docs/rewards.md do what the pages say of
them."""

import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from verl_like.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimate_advantages,
    get_adv_estimator_fn,
)
from verl_like.algorithms.aggregation import BatchCounts
from verl_like.algorithms.policy_losses import POLICY_LOSSES, get_policy_loss_fn
from verl_like.algorithms.registry import call_by_name, options_class
from verl_like.protocol import DataProto
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.ray import RayClassWithInitArgs
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker

DOCS = Path(__file__).parents[2] / "docs"


def example(page: str, start: str, folder: Path) -> ModuleType:
    """The code block of a page that starts so, as a module."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    (code,) = [block for block in blocks if block.startswith(start)]
    path = folder / "documented_example.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("documented_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a worker's class is found by the name of its module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch):
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
        monkeypatch.setattr(registry, "over_batch", set(registry.over_batch))


REWARDS_BR = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 1.0]])
MASK_BR = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_the_estimator_with_an_option_of_its_own_gets_the_option(tmp_path: Path):
    example(
        "extending.md", "from verl_like.algorithms.advantages import AdvantageOptions", tmp_path
    )
    estimator = get_adv_estimator_fn("shrink")
    options = options_class(estimator)(factor=0.25)
    inputs = {"token_level_rewards": REWARDS_BR, "response_mask": MASK_BR, "options": options}
    advantages_BR, returns_BR = estimate_advantages(estimator, inputs)
    assert advantages_BR.tolist() == [[0.0, 0.75, 0.0], [0.0, 0.0, 0.25]]
    assert torch.equal(returns_BR, REWARDS_BR)


def test_the_estimator_over_the_batch_centres_the_scores_of_its_rows(tmp_path: Path):
    example(
        "algorithms.md", "from verl_like.algorithms.advantages import register_adv_est", tmp_path
    )
    inputs = {"token_level_rewards": REWARDS_BR, "response_mask": MASK_BR}
    advantages_BR, returns_BR = estimate_advantages(get_adv_estimator_fn("centred_reward"), inputs)
    assert advantages_BR.tolist() == [[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]]  # scores 3 and 1, mean 2
    assert torch.equal(returns_BR, advantages_BR)
    assert "centred_reward" in ADVANTAGE_ESTIMATORS.over_batch


def test_the_loss_is_the_mean_over_tokens_and_has_no_gradient_at_the_mask(tmp_path: Path):
    example("algorithms.md", "from verl_like.algorithms.aggregation import agg_loss", tmp_path)
    log_prob_BR = torch.tensor([[-1.0, -2.0, torch.nan], [-0.5, -0.5, -3.0]], requires_grad=True)
    inputs = {
        "log_prob": log_prob_BR,
        "advantages": torch.tensor([[2.0, 2.0, 0.0], [1.0, 1.0, 1.0]]),
        "response_mask": MASK_BR,
        "loss_agg_mode": "token-mean",
        "counts": BatchCounts(batch_num_tokens=5.0, global_batch_size=2.0),
    }
    loss, metrics = call_by_name(get_policy_loss_fn("log_prob_times_advantage"), inputs)
    loss.backward()
    assert loss.item() == pytest.approx((2 + 4 + 0.5 + 0.5 + 3) / 5)
    assert log_prob_BR.grad.tolist() == [
        [pytest.approx(-0.4)] * 2 + [0.0],
        [pytest.approx(-0.2)] * 3,
    ]
    assert metrics.keys() == {"actor/log_prob"}


def test_the_reward_compares_the_answer_without_spaces_around_it(tmp_path: Path):
    reward = example("extending.md", "# my_reward.py", tmp_path)
    assert reward.compute_score("a", " 72\n", "72") == {"score": 1.0, "length": 4}
    assert reward.compute_score("a", "27", "72")["score"] == 0.0


def test_the_estimator_of_a_group_measures_scores_by_the_range_of_their_prompt(tmp_path: Path):
    example("rewards.md", "# my_run/my_group_estimator.py", tmp_path)
    inputs = {
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 5.0], [3.0, 0.0], [0.0, 2.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]]),
        "index": np.array(["a", "a", "a", "b"], dtype=object),
    }
    estimator = get_adv_estimator_fn("above_mean_by_range")
    advantages_BR, _ = estimate_advantages(estimator, inputs)
    # The scores 1, 5 and 3 of prompt a have the mean 3 and the range 4.
    assert advantages_BR[:3].tolist() == [[-0.5, -0.5], [0.5, 0.5], [0.0, 0.0]]


def test_the_role_of_a_group_divides_the_reward_among_equal_responses_to_a_prompt(tmp_path: Path):
    role = example("rewards.md", "# my_run/my_group_reward.py", tmp_path).Variety
    group = LocalWorkerGroup(RayClassWithInitArgs(role, config=None), 2, role="variety")
    columns = {
        "responses": torch.tensor([[5, 6, 0], [5, 6, 9], [5, 6, 7], [5, 6, 0]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]),
    }
    uids = np.array(["a", "a", "a", "b"], dtype=object)
    scored = group.annotate.remote(DataProto.from_dict(columns, {"uid": uids})).get(timeout=10)
    expected = [[0.0, 0.5, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    assert scored.batch["variety_scores"].tolist() == expected
    assert role.reward_columns == {"variety_scores": 0.2}


@pytest.mark.parametrize("method", [ActorWorker.policy_loss, CriticWorker.value_loss])
def test_the_page_has_the_signature_of_an_objective(method: Callable):
    source = textwrap.dedent(inspect.getsource(method))
    signature, _, _ = source.partition(':\n    """')
    assert f"{signature}: ...\n" in (DOCS / "extending.md").read_text()
