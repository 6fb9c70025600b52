"""Prompts: reading, checking and tokenising them, and the order in which they are used."""

from verl_like.data.prompt_dataset import PromptDataset
from verl_like.data.sampler import EpochSampler
