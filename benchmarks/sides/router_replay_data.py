"""The sizes of `router_replay`."""

from benchmarks.harness import sized

NUM_PROMPTS = sized(64, 4)
PROMPT_LENGTH = 64
NUM_DRAWN = sized(64, 4)
VOCABULARY = 50
