"""PPO of the toy world from Python: python_way_script.py FOLDER NUM_PROCESSES, beside the command
of python_way.py."""

import sys
from copy import deepcopy

import pyarrow.parquet as pq
from torch.optim import AdamW
from transformers import AutoTokenizer

from benchmarks.python_way import KEYS
from benchmarks.toy_world import FOLDER
from verl_like.simple import Actor, Critic, DDPStrategy, NaiveStrategy, PPOTrainer


def main(folder: str, num_processes: int) -> None:
    strategy = NaiveStrategy() if num_processes == 1 else DDPStrategy(num_processes)
    model = str(FOLDER / "model")
    with strategy.model_init_context():
        actor = Actor(pretrained=model)
        critic = Critic()
        initial_model = deepcopy(actor)
    actor_optim = AdamW(actor.parameters(), lr=1e-4)
    critic_optim = AdamW(critic.parameters(), lr=1e-3)
    trainer = PPOTrainer(
        strategy,
        *(actor, critic, None, initial_model, actor_optim, critic_optim),
        kl_coef=0.001,
        train_batch_size=64,
        experience_batch_size=256,
        max_length=18,
        tokenizer=AutoTokenizer.from_pretrained(model),
        overrides=[*KEYS, f"trainer.default_local_dir={folder}"],
    )
    trainer.fit(pq.read_table(FOLDER / "train.parquet").to_pylist(), max_timesteps=1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
