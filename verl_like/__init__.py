"""verl_like: single-controller, hybrid-flow reinforcement learning of language models."""
