"""A plugin whose maker writes what it makes to the folder of the run."""

from pathlib import Path

from verl_like.trainer.loop.experience import Experience
from verl_like.trainer.ppo.experience_maker import ExperienceMaker, Generated
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, register_trainer


class KeepingMaker(ExperienceMaker):
    def complete(self, generated: Generated) -> Experience:
        experience = super().complete(generated)
        experience.batch.save_to_disk(Path(self.config.trainer.default_local_dir) / "made")
        return experience


@register_trainer
class KeepingTrainer(RayPPOTrainer):
    def build_maker(self) -> ExperienceMaker:
        return KeepingMaker(**vars(super().build_maker()))
