"""What agents need, checked before Ray starts: their code or server, and the chat template."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl_like.trainer.config.roles import Role
from verl_like.trainer.config.schema import PPOConfig
from verl_like.workers.agents.chat import ChatFormat
from verl_like.workers.agents.endpoint import listen
from verl_like.workers.agents.hosts import Description, describe_environment, describe_harness
from verl_like.workers.agents.openenv_server import describe_openenv
from verl_like.workers.agents.verifiers_server import describe_verifiers
from verl_like.workers.rollout.base import special_token_ids


def check_agents(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> Description | None:
    """Returns which tools the agents have, and whether their episodes have rewards of their own.
    Returns None without agents.

    Raises ValueError if their code cannot be loaded or lacks something, or if the model's chat
    template or vLLM's parsers do not fit.
    """
    agent = config.agent
    if agent.way is None:
        return None
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"agent.{agent.way} needs vllm, which reads tool calls and serves the endpoint, and it "
            "is not installed: run bash scripts/environment.sh"
        )
    if agent.environment:
        description = describe_environment(agent.environment, agent.max_memory_gb)
    elif agent.server:
        description = describe_server(agent.server)
    else:
        assert agent.harness
        describe_harness(agent.harness, agent.max_memory_gb)
        description = Description(tools=[], has_reward=True)
    require_free_ports(config)
    policy = config.actor_rollout_ref
    end_token_ids, _padding = special_token_ids(tokenizer, policy.model.path)
    chat = ChatFormat(
        tokenizer,
        config.data.apply_chat_template_kwargs,
        end_token_ids,
        tool_parser=policy.rollout.multi_turn.format,
        reasoning_parser=agent.reasoning_parser,
        keep_reasoning=agent.keep_reasoning,
    )
    require_extendable(chat, description.tools)
    return description


def describe_server(server: str) -> Description:
    """Asks an environment server which tools it has. Raises ValueError if it does not answer, or
    not by the protocol that it should have."""
    protocol, _, address = server.partition("://")
    if protocol == "openenv":
        return describe_openenv(address)
    return describe_verifiers(address)


def require_free_ports(config: PPOConfig) -> None:
    """Raises ValueError if a port of the endpoint is taken on this machine, where Ray is started.

    A cluster that runs already has machines that are not looked at.
    """
    first = config.agent.port
    if not first or config.cluster_address:
        return
    pool = config.role_mapping[Role.Agent]
    num_ports = max(config.resource_pool_spec[pool])
    for port in range(first, first + num_ports):
        listen(port).close()


def require_extendable(chat: ChatFormat, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if the chat template does not extend its text when messages are added to a
    conversation, so that no turn could stand behind another one."""
    reply: dict[str, Any] = {"role": "assistant", "content": "1"}
    added = {"role": "user", "content": "2"}
    if tools:
        name = tools[0]["function"]["name"]
        function = {"name": name, "arguments": {}}
        call = {"id": "call-0", "type": "function", "function": function}
        reply["tool_calls"] = [call]
        added = {"role": "tool", "name": name, "content": "2"}
    messages = [{"role": "user", "content": "0"}, reply]
    try:
        before = chat.render(messages, tools, is_prompt=False)
        prompt = chat.render([*messages, added], tools, is_prompt=True)
    except TemplateError as error:
        raise ValueError(
            f"the chat template refuses a turn that is followed by a {added['role']} message "
            f"({error}): set actor_rollout_ref.model.tokenizer_path to a tokenizer with a template "
            "for several turns and tools"
        ) from error
    reply_ids = chat.tokens("1")
    if not chat.tail(prompt, before, reply_ids):
        raise ValueError(
            "the chat template does not extend the text of a conversation when a "
            f"{added['role']} message is added to it, so an agent could not take a second turn: "
            f"{before!r} became {prompt!r}; set actor_rollout_ref.model.tokenizer_path to a "
            "tokenizer with a template for several turns and tools"
        )
