"""PPO from Python, in one process: a tiny model learns to write what a reward model scores high.

python -m examples.python_way.ppo_from_scratch
"""

from copy import deepcopy

from torch.optim import AdamW
from transformers import LlamaConfig

from examples.split_placement.make_toy_world import make_tokenizer
from verl_like.simple import Actor, Critic, NaiveStrategy, PPOTrainer, RewardModel

tokenizer = make_tokenizer()  # digits, + and =
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
prompts = [f"{a}+{b}=" for a in range(10, 18) for b in range(10, 18)]


def main() -> list[float]:
    """Trains; returns the mean score of the responses in each step."""
    strategy = NaiveStrategy(seed=1)
    with strategy.model_init_context():
        actor = Actor(config=config)
        critic = Critic()
        initial_model = deepcopy(actor)
        reward_model = RewardModel(deepcopy(critic.model), deepcopy(critic.value_head))
    actor_optim = AdamW(actor.parameters(), lr=3e-3)
    critic_optim = AdamW(critic.parameters(), lr=3e-3)
    (actor, actor_optim), (critic, critic_optim), reward_model, initial_model = strategy.prepare(
        (actor, actor_optim), (critic, critic_optim), reward_model, initial_model
    )
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward_model,
        initial_model,
        actor_optim,
        critic_optim,
        kl_coef=0.001,
        train_batch_size=32,
        experience_batch_size=32,
        max_epochs=2,
        max_length=16,
        tokenizer=tokenizer,
    )
    scores = [
        row["critic/score/mean"] for row in trainer.fit(prompts, num_episodes=1, max_timesteps=12)
    ]
    print("mean score by step:", *(f"{score:.3f}" for score in scores))
    strategy.save_model(actor, "actor", only_rank0=True)
    strategy.save_optimizer(actor_optim, "actor_optimizer", only_rank0=False)
    return scores


if __name__ == "__main__":
    main()
