"""PPO: a maker, which turns prompts into experience, and a learner, which turns experience into
weights."""
