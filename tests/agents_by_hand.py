"""Agents whose episodes are an async function of the session, written in a test."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_like.workers.agent_worker import AgentWorker
from verl_like.workers.agents.runner import Outcome, Way
from verl_like.workers.agents.session import Session

Act = Callable[[Session], Any]


class ByHand(Way):
    """A test's way to act in episodes."""

    def __init__(self, act: Act) -> None:
        self.act = act

    async def start(self) -> None:
        pass

    async def run(self, session: Session) -> Outcome:
        return await self.act(session)

    async def close(self) -> None:
        pass


class AgentsByHand(AgentWorker):
    act: Act

    def make_way(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]) -> Way:
        return ByHand(self.act)
