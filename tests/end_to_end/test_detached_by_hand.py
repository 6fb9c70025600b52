"""The example that connects a maker and a trainer by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import tiny_run_settings
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.detached.by_hand import main

pytestmark = [pytest.mark.ray, pytest.mark.proof]


def test_a_maker_with_all_models_and_a_trainer_with_a_critic_are_connected_by_hand(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture
):
    settings = tiny_run_settings(tmp_path, tiny_llama)
    policy, _ = tiny_llama()
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(
        tmp_path / "judge"
    )
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "judge")
    settings += ["algorithm.adv_estimator=gae", "algorithm.rollout_correction.bypass_mode=false"]
    settings += ["reward_model.enable=true", f"reward_model.model.path={tmp_path}/judge"]
    main([*settings, f"critic.model.path={policy}"])
    output = capsys.readouterr().out
    assert "step 0: {'val-core/exact_match/acc/mean@1': " in output and "step 2: {" in output
    assert "2 batches of experience, weights of version 2" in output
    assert "'trained': 8, 'training': 0, 'in_buffer': 0, 'in_flight': 0" in output
