"""What policy losses ask for: a teacher of its own weights, and an aggregation for which they are
defined."""

import json
from pathlib import Path

import pytest
from tiny_worker_models import local_group, make_batch, policy_config, write_model
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from verl_like.protocol.row_ops import deep_equal
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.inputs import (
    check_models,
    check_policy_loss,
    check_teacher,
    notes_on_aggregation,
)
from verl_like.workers.actor import ActorWorker
from verl_like.workers.models.pretrained import load_tokenizer
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.teacher import TeacherWorker

LOSS = "actor_rollout_ref.actor.policy_loss"


def distilling(policy, teacher, **options):
    """The settings of a policy that learns from a teacher."""
    return policy_config(
        policy, policy_loss={"loss_mode": "distillation", "teacher_path": teacher, **options}
    )


def test_a_policy_moves_towards_a_teacher_unless_it_is_the_teacher(tmp_path):
    student, teacher = (
        write_model(tmp_path / "student"),
        write_model(tmp_path / "teacher", tie=True),
    )
    batch = make_batch()
    for path, is_itself in ((student, True), (teacher, False)):
        config = distilling(student, path, use_task_rewards=False)
        group = local_group(TeacherWorker, config)
        said = group.compute_teacher_log_prob(batch).get().batch["teacher_log_prob"]
        reference = local_group(ReferenceWorker, policy_config(path))
        assert deep_equal(said, reference.compute_ref_log_prob(batch).get().batch["ref_log_prob"])

        actor = local_group(ActorWorker, config)
        data = make_batch()
        data.batch["teacher_log_prob"] = said
        data.batch["old_log_probs"] = actor.compute_log_prob(data).get().batch["old_log_probs"]
        metrics = actor.update_actor(data).get().meta_info["metrics"]
        assert (metrics["actor/grad_norm"].value < 1e-5) == is_itself
        assert (metrics["distillation/abs_loss"].value < 1e-5) == is_itself


class CustomTeacher(ReferenceWorker):
    """A custom role that writes the column."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, writes=["teacher_log_prob"])
    def annotate(self, data):
        return data


def test_a_loss_without_a_teacher_is_refused():
    files = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=c"]
    run = load_ppo_config([*files, f"{LOSS}.loss_mode=distillation"])
    check_policy_loss(run, {"judge": CustomTeacher})
    check_policy_loss(
        load_ppo_config([*files, f"{LOSS}.loss_mode=distillation", f"{LOSS}.teacher_path=d"]), {}
    )
    with pytest.raises(
        ValueError,
        match=r"loss_mode=distillation needs teacher_log_prob, which no role.*teacher_path",
    ):
        check_policy_loss(run, {"judge": ReferenceWorker})


def rewrite(path, old, new):
    assert old in Path(path).read_text()
    Path(path).write_text(Path(path).read_text().replace(old, new))


def resize(folder, num_rows):
    """Gives the model in the folder so many rows of embeddings."""
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(num_rows)
    model.save_pretrained(folder)


def test_a_teacher_has_the_tokenizer_of_the_policy_its_length_and_perhaps_more_rows_of_embeddings(
    tmp_path,
):
    student, teacher = write_model(tmp_path / "student"), write_model(tmp_path / "teacher")
    size = json.loads((tmp_path / "teacher/config.json").read_text())["vocab_size"]
    lengths = ["data.max_prompt_length=8", "data.max_response_length=8"]
    run = [
        *lengths,
        "data.train_files=a",
        "data.val_files=b",
        f"actor_rollout_ref.model.path={student}",
    ]
    run += [f"{LOSS}.loss_mode=distillation", f"{LOSS}.teacher_path={teacher}"]
    tokenizer = load_tokenizer(policy_config(student).model)
    config = tmp_path / "teacher/config.json"

    resize(teacher, size + 8)
    check_teacher(distilling(student, teacher).teacher_model, tokenizer)
    check_models(load_ppo_config([*run, "critic.model.path=" + student]))
    resize(teacher, size - 1)
    with pytest.raises(ValueError, match=r"policy_loss.teacher_path=.*is not that of the policy"):
        check_teacher(distilling(student, teacher).teacher_model, tokenizer)
    resize(teacher, size)
    rewrite(tmp_path / "teacher/tokenizer.json", '"<eos>"', '"<end>"')
    with pytest.raises(ValueError, match="is not that of the policy"):
        check_teacher(distilling(student, teacher).teacher_model, tokenizer)
    rewrite(config, '"max_position_embeddings": 2048', '"max_position_embeddings": 15')
    with pytest.raises(ValueError, match=f"teacher_path={teacher} has 15 positions"):
        check_models(load_ppo_config([*run, "critic.model.path=" + student]))


@pytest.mark.parametrize("loss", ["sapo", "geo_mean"])
def test_a_loss_defined_for_one_aggregation_has_it_and_refuses_the_others(loss):
    files = [
        "data.train_files=a",
        "data.val_files=b",
        "actor_rollout_ref.model.path=c",
        f"{LOSS}.loss_mode={loss}",
    ]
    config = load_ppo_config(files)
    assert config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"
    check_policy_loss(config, {})
    with pytest.raises(
        ValueError,
        match=f"the policy loss {loss} is defined only for seq-mean-token-mean; set that",
    ):
        check_policy_loss(
            load_ppo_config([*files, "actor_rollout_ref.actor.loss_agg_mode=token-mean"]), {}
        )


def test_gspo_takes_the_mean_of_responses_unless_another_aggregation_is_set_which_it_warns_of():
    files = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=c"]
    modes = {}
    for loss in ("vanilla", "gspo"):
        config = load_ppo_config([*files, f"{LOSS}.loss_mode={loss}"])
        modes[loss] = config.actor_rollout_ref.actor.loss_agg_mode, config.critic.loss_agg_mode
        assert notes_on_aggregation(config) == []
    assert modes == {"vanilla": ("token-mean",) * 2, "gspo": ("seq-mean-token-mean",) * 2}
    for loss, num_warnings in (("vanilla", 0), ("gspo", 1)):
        set_mode = "actor_rollout_ref.actor.loss_agg_mode=token-sum"
        config = load_ppo_config([*files, f"{LOSS}.loss_mode={loss}", set_mode])
        assert config.actor_rollout_ref.actor.loss_agg_mode == "token-sum"
        notes = notes_on_aggregation(config)
        assert len(notes) == num_warnings
        assert all(
            "loss_agg_mode=token-sum, but the paper of the policy loss gspo takes seq-mean" in n
            for n in notes
        )


def test_the_aggregation_of_a_loss_of_a_plugin_is_that_of_its_signature(tmp_path, monkeypatch):
    signature = (
        "old_log_prob, log_prob, advantages, response_mask, "
        "loss_agg_mode='seq-mean-token-sum', config=None"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "summing_plugin.py").write_text(
        "from verl_like.algorithms.policy_losses import register_policy_loss\n"
        f"@register_policy_loss('summed')\ndef summed({signature}): ...\n"
    )
    files = [
        "data.train_files=a",
        "data.val_files=b",
        "actor_rollout_ref.model.path=c",
        "plugins=[summing_plugin]",
    ]
    config = load_ppo_config([*files, f"{LOSS}.loss_mode=summed"])
    assert config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum"


def test_what_is_wrong_with_a_teacher_is_said_of_the_keys_that_set_it(tmp_path):
    student, missing, empty = (
        write_model(tmp_path / "student"),
        tmp_path / "missing",
        tmp_path / "empty",
    )
    LlamaConfig().save_pretrained(empty)
    # Attn_pdrop is 0.1
    GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0).save_pretrained(tmp_path / "noisy")
    run = [
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "data.train_files=a",
        "data.val_files=b",
    ]
    run += [f"actor_rollout_ref.model.path={student}", f"{LOSS}.loss_mode=distillation"]
    for teacher, problem in {
        missing: ": there is no model",
        empty: ".*has no weights",
        tmp_path / "noisy": r".*attn_pdrop=0\.1.*; set "
        r"actor_rollout_ref\.model\.override_config\.attn_pdrop=0\.0\.$",
    }.items():
        with pytest.raises(ValueError, match=f"^{LOSS}.teacher_path={teacher}{problem}"):
            check_models(load_ppo_config([*run, f"{LOSS}.teacher_path={teacher}"]))
    with pytest.raises(ValueError, match=f"^{LOSS}.teacher_path={missing}: there is no model"):
        TeacherWorker(distilling(student, str(missing))).build_model(True)
