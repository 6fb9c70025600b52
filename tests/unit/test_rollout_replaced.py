"""Classes of plugins with methods that the library used to call."""

import pytest

from verl_like.workers.rollout import RolloutEngine
from verl_like.workers.rollout_worker import RolloutWorker


def test_an_engine_with_a_method_that_nothing_calls_any_more_is_refused_naming_what_is_instead():
    with pytest.raises(
        ValueError, match=r"OwnEngine has a method requests_for, .*: .* follow from rules\(\)"
    ):

        class OwnEngine(RolloutEngine):
            def requests_for(self, prompts):
                return {}


def test_a_rollout_worker_with_a_method_that_nothing_calls_any_more_is_refused_naming_what_is_instead():
    with pytest.raises(
        ValueError, match=r"OwnWorker has a method submit_prompts, .*: generate_sequences of some"
    ):

        class OwnWorker(RolloutWorker):
            def submit_prompts(self, prompts, replicas):
                return None
