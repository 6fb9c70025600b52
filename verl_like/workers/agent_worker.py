"""The role that runs episodes: environments, tools and harnesses, which call the policy."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.worker import Worker
from verl_like.workers.agents.batch import ROW_COLUMNS, EpisodeRules
from verl_like.workers.agents.chat import ChatFormat
from verl_like.workers.agents.endpoint import Endpoint
from verl_like.workers.agents.episode import EpisodeSpec
from verl_like.workers.agents.harness import Harness
from verl_like.workers.agents.hosts import Description, HostedCode, Hosts
from verl_like.workers.agents.openenv_server import OpenEnvServer
from verl_like.workers.agents.router import call_by_episodes
from verl_like.workers.agents.runner import Answers, EpisodeRunner, Exchange, Way
from verl_like.workers.agents.session import Limits
from verl_like.workers.agents.tool_loop import EnvironmentClass, ToolLoop
from verl_like.workers.agents.verifiers_server import VerifiersServer
from verl_like.workers.config.agent import AgentConfig
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.models.packing import SEQUENCE_COLUMNS
from verl_like.workers.models.pretrained import load_tokenizer
from verl_like.workers.rollout.base import special_token_ids
from verl_like.workers.rollout_worker import PROMPT_COLUMNS

BY_EPISODES = replace(Dispatch.DP_COMPUTE_PROTO, name="BY_EPISODES", call_fn=call_by_episodes)
"""DP_COMPUTE_PROTO, but the driver's router makes the call."""


class AgentWorker(Worker):
    """One rank of the agents. It runs a share of the episodes, and asks the driver for the tokens
    of the policy."""

    reward_columns: ClassVar[Mapping[str, float]] = {"episode_scores": 1.0}

    def __init__(
        self,
        config: AgentConfig,
        policy: ActorRolloutRefConfig,
        rules: Mapping[str, Any],
        template_kwargs: Mapping[str, Any],
        agents: Description,
    ) -> None:
        """Args:
        rules: what `EpisodeRules` says, without the token of fillers.
        template_kwargs: further arguments of the chat template.
        agents: which tools there are, and whether episodes have rewards of their own.
        """
        self.config = config
        self.policy = policy
        self.rules = rules
        self.template_kwargs = template_kwargs
        self.agents = agents

    def init_model(self) -> None:
        """Starts what acts in episodes."""
        rollout = self.policy.rollout
        model = self.policy.model
        tokenizer = load_tokenizer(model)
        end_token_ids, self.filler_token = special_token_ids(tokenizer, model.path)
        limits = Limits(
            first_prompt=rollout.prompt_length,
            response=rollout.response_length,
            context=rollout.prompt_length + rollout.response_length,
            call_timeout_s=self.config.call_timeout_s,
        )
        way = self.make_way(tokenizer, end_token_ids)
        self.runner = EpisodeRunner(way, limits, self.config)
        gc.freeze()  # a collection would pass over all that vLLM's import has made

    def make_way(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]) -> Way:
        """Makes what acts in episodes."""
        config = self.config
        multi_turn = self.policy.rollout.multi_turn
        chat = ChatFormat(
            tokenizer,
            self.template_kwargs,
            end_token_ids,
            tool_parser=multi_turn.format,
            reasoning_parser=config.reasoning_parser,
            keep_reasoning=config.keep_reasoning,
        )
        loop = ToolLoop(
            chat,
            self.agents.tools,
            has_reward=self.agents.has_reward,
            max_turns=multi_turn.max_assistant_turns,
            config=config,
        )
        if config.environment:
            code = HostedCode("environment", config.environment)
            hosts = Hosts(code, config.num_processes, config.max_memory_gb)
            return EnvironmentClass(hosts, loop)
        protocol, _, address = (config.server or "").partition("://")
        if protocol == "openenv":
            return OpenEnvServer(address, loop)
        port = config.port
        if port:
            port += self.local_rank
        endpoint = Endpoint(chat, self.policy.model, port=port)
        if protocol == "verifiers":
            return VerifiersServer(address, endpoint, timeout_s=config.reset_timeout_s)
        assert config.harness
        code = HostedCode("harness", config.harness, endpoint.reward_key)
        hosts = Hosts(code, config.num_processes, config.max_memory_gb)
        return Harness(hosts, endpoint, timeout_s=config.episode_timeout_s)

    def close(self) -> None:
        if "runner" in vars(self):  # it is missing before init_model
            self.runner.close()

    @register(
        dispatch_mode=BY_EPISODES,
        blocking=False,
        reads=[*PROMPT_COLUMNS, *ROW_COLUMNS, "raw_prompt"],
        writes=[
            *SEQUENCE_COLUMNS,
            "rollout_log_probs",
            "policy_version",
            "episode_scores",
            "routed_experts?",
        ],
        jagged=True,
    )
    def run_episodes(self, prompts: DataProto) -> DataProto:
        """Runs n episodes for each of the B prompts, and returns a batch of their rows. The
        episodes of a prompt are next to each other, and the rows of an episode are a sample.

        A call of the driver does not run this method: its router begins the episodes on the ranks
        and answers their requests.
        """
        raise AssertionError("the driver's router runs episodes")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def episode_rules(self) -> EpisodeRules:
        """Returns what the driver does with episodes that failed."""
        return EpisodeRules(filler_token=self.filler_token, **self.rules)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, is_recorded=False)
    def exchange(self, specs: Sequence[EpisodeSpec], answers: Answers, wait_s: float) -> Exchange:
        """Begins episodes, takes the answers to requests, and returns what is new, see
        `EpisodeRunner.exchange`."""
        self.runner.begin(specs)
        return self.runner.exchange(answers, wait_s)


class UnscoredAgentWorker(AgentWorker):
    """A rank of agents whose episodes have no reward of their own: rules or models score them."""

    reward_columns: ClassVar[Mapping[str, float]] = {}
