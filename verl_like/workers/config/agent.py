"""Settings of agents: who acts, how long each step may take, and what a failure does."""

import re

from pydantic import model_validator

from verl_like.config_model import ConfigModel, NonNegativeInt, PositiveFloat, PositiveInt

_SERVER = re.compile(r"(verifiers|openenv)://[\w.-]+:\d+", re.ASCII)


class MultiTurnConfig(ConfigModel):
    """Turns of an agent."""

    max_assistant_turns: PositiveInt | None = None
    """Most calls of the model in an episode of agent.environment; null means as many as fit into
    data.max_response_length."""
    format: str = "hermes"
    """vLLM's parser that reads tool calls from the model's text, such as hermes, qwen3_xml or
    llama3_json."""


class AgentConfig(ConfigModel):
    """Episodes of several turns, with tools, in place of single responses. One of harness,
    environment and server says who acts; without it there are no agents."""

    harness: str | None = None
    """module:function, an async function run(row, base_url, api_key) that calls the model at an
    OpenAI-compatible address and returns a reward or None."""
    environment: str | None = None
    """module:Class, whose public methods are the tools: reset(**row), optionally get_reward()."""
    server: str | None = None
    """An environment server: verifiers://host:port (its EnvServer) or openenv://host:port."""
    num_attempts: PositiveInt = 3
    """How often an episode is tried that its environment, harness or engine fails."""
    num_processes: PositiveInt = 1
    """Processes of each rank of the agents that run environments or harnesses."""
    max_memory_gb: PositiveFloat = 4.0
    """Memory of one such process with the programs that it starts, in 10^9 bytes; one that uses
    more is replaced."""
    max_episodes: PositiveInt = 512
    """Episodes of one rank that run at the same time."""
    episode_timeout_s: PositiveFloat = 1000.0
    """Seconds one attempt at an episode may take."""
    call_timeout_s: PositiveFloat = 600.0
    """Seconds a call of the model may take."""
    reset_timeout_s: PositiveFloat = 60.0
    """Seconds the reset of an environment may take, and the wait for a server that is not there."""
    tool_timeout_s: PositiveFloat = 60.0
    """Seconds a call of a tool may take."""
    reward_timeout_s: PositiveFloat = 60.0
    """Seconds the reward of an episode may take."""
    reasoning_parser: str | None = None
    """vLLM's parser that takes the reasoning out of the model's text, such as qwen3; null means
    that reasoning stays part of the text."""
    keep_reasoning: bool = False
    """Keep the tokens of earlier reasoning in the prompt of the next turn also where the harness or
    the chat template leaves it out. Without it such a turn begins a new row."""
    port: NonNegativeInt = 0
    """Port of the endpoint of rank 0 of a node, the next ones those of its further ranks; 0 means
    any free ones."""

    @property
    def _ways(self) -> list[str]:
        names = ("harness", "environment", "server")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def way(self) -> str | None:
        """The name of the key that says who acts, or None without agents."""
        return next(iter(self._ways), None)

    @model_validator(mode="after")
    def one_way_is_chosen(self) -> "AgentConfig":
        if len(self._ways) > 1:
            raise ValueError(
                f"{' and '.join(self._ways)} are set, but an episode has one of them: unset the "
                "others"
            )
        for name in ("harness", "environment"):
            path = getattr(self, name)
            module, separator, attribute = (path or "module:name").partition(":")
            if not (module and separator and attribute.isidentifier()):
                raise ValueError(f"{name}={path}: expected module:name, e.g. my_agent:run")
        if self.server is not None and not _SERVER.fullmatch(self.server):
            raise ValueError(
                f"server={self.server}: expected verifiers://host:port or openenv://host:port"
            )
        return self
