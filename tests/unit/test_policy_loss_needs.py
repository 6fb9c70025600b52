"""What policy losses ask for: a teacher of its own weights, and an aggregation for which they are defined."""

import pytest
import torch
from tiny_worker_models import local_group, make_batch, policy_config, write_model

from verl_like.single_controller.decorator import Dispatch, register
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo_inputs import check_policy_loss
from verl_like.workers.actor import ActorWorker
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.teacher import TeacherWorker

LOSS = "actor_rollout_ref.actor.policy_loss"


def distilling(policy, teacher, **options):
    """The settings of a policy that learns from a teacher."""
    return policy_config(policy, policy_loss={"loss_mode": "distillation", "teacher_path": teacher, **options})


def test_a_policy_moves_towards_a_teacher_unless_it_is_the_teacher(tmp_path):
    student, teacher = write_model(tmp_path / "student"), write_model(tmp_path / "teacher", tie=True)
    batch = make_batch()
    for path, is_itself in ((student, True), (teacher, False)):
        config = distilling(student, path, use_task_rewards=False)
        group = local_group(TeacherWorker, config)
        said = group.compute_teacher_log_prob(batch).get().batch["teacher_log_prob"]
        reference = local_group(ReferenceWorker, policy_config(path))
        assert torch.equal(said, reference.compute_ref_log_prob(batch).get().batch["ref_log_prob"])

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
    check_policy_loss(load_ppo_config([*files, f"{LOSS}.loss_mode=distillation", f"{LOSS}.teacher_path=d"]), {})
    with pytest.raises(ValueError, match=r"loss_mode=distillation needs teacher_log_prob, which no role.*teacher_path"):
        check_policy_loss(run, {"judge": ReferenceWorker})


@pytest.mark.parametrize("loss", ["sapo", "geo_mean"])
def test_a_loss_defined_for_one_aggregation_refuses_the_others(loss):
    files = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=c", f"{LOSS}.loss_mode={loss}"]
    with pytest.raises(ValueError, match=f"the policy loss {loss} is defined only for seq-mean-token-mean; set that"):
        check_policy_loss(load_ppo_config(files), {})
    check_policy_loss(load_ppo_config([*files, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]), {})
