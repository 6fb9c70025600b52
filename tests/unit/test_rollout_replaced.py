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


def test_the_method_that_advanced_sequences_is_refused_naming_what_does_so_now():
    with pytest.raises(
        ValueError,
        match=r"OwnWorker has a method advance_sequences, .*: the engine computes by itself; the "
        r"future of generate_sequences says when responses ended",
    ):

        class OwnWorker(RolloutWorker):
            def advance_sequences(self):
                return None
