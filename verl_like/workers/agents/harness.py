"""Episodes of a harness: user code that calls the policy at the endpoint."""

from dataclasses import dataclass

from verl_like.workers.agents.endpoint import Endpoint, without_secrets
from verl_like.workers.agents.episode import EpisodeFailed, RewardProblem
from verl_like.workers.agents.hosts import Hosts, UserCodeError
from verl_like.workers.agents.runner import Outcome
from verl_like.workers.agents.session import Session


@dataclass
class Harness:
    """The way of `agent.harness`: an async function `run(row, base_url, api_key)`, which returns a
    reward or None."""

    hosts: Hosts
    endpoint: Endpoint
    timeout_s: float

    async def start(self) -> None:
        await self.endpoint.start()
        await self.hosts.start()

    async def close(self) -> None:
        await self.hosts.close()
        await self.endpoint.close()

    async def run(self, session: Session) -> Outcome:
        seat = await self.hosts.seat()
        access = self.endpoint.open(session)
        arguments = {
            "row": session.spec.row,
            "base_url": access.base_url,
            "api_key": self.endpoint.api_key,
        }
        problem = None
        reward = None
        try:
            reward = await seat.call("run", arguments, self.timeout_s)
        except UserCodeError as error:
            problem = error
        finally:
            self.endpoint.forget(access)
            seat.leave()
        if access.failure is not None:
            raise access.failure
        if reward is None:
            reward = access.reward
        if problem is None:
            if reward is None and access.reward_problem:
                raise RewardProblem(access.reward_problem)
            return Outcome(reward)
        if session.counts["room_used_up"]:
            if reward is None:
                reward = 0.0
            return Outcome(reward, "room")
        keys = (self.endpoint.api_key, self.endpoint.reward_key)
        text = without_secrets(str(problem), access.base_url, *keys)
        raise EpisodeFailed("harness", f"run raised {text}")
