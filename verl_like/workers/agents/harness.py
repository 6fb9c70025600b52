"""Episodes of a harness: user code that calls the policy at the endpoint."""

from verl_like.workers.agents.endpoint import Endpoint
from verl_like.workers.agents.episode import EpisodeFailed
from verl_like.workers.agents.hosts import Hosts, UserCodeError
from verl_like.workers.agents.runner import Outcome
from verl_like.workers.agents.session import Session


class Harness:
    """The way of `agent.harness`: an async function `run(row, base_url, api_key)`, which returns a
    reward or None."""

    def __init__(self, hosts: Hosts, endpoint: Endpoint, *, timeout_s: float) -> None:
        self.hosts = hosts
        self.endpoint = endpoint
        self.timeout_s = timeout_s

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
        has_ended = False
        outcome = Outcome(None)
        failure = None
        try:
            reward = await seat.call("run", arguments, self.timeout_s)
            outcome = Outcome(access.reward if reward is None else reward)
            has_ended = True
        except UserCodeError as error:
            outcome = Outcome(0.0, "room")
            if not session.counts["room_used_up"]:
                text = str(error).replace(access.secret, "...")  # a client names its address
                failure = EpisodeFailed("harness", f"run raised {text}")
            has_ended = True
        finally:
            self.endpoint.forget(access)
            seat.leave(failed=not has_ended)
        failure = access.failure or failure
        if failure is not None:
            raise failure
        return outcome
