"""The key of the reward route, in the process that runs harnesses."""

_key = ""


def reward_key() -> str:
    """Returns the key that posts the reward of an episode, in the header `X-Reward-Key` of `POST
    <base_url without /v1>/reward`.

    It is for code that starts a harness elsewhere. A program that is started from here inherits it
    neither as a variable of its environment nor in another way.
    """
    return _key


def set_reward_key(key: str) -> None:
    """Sets what `reward_key` returns."""
    global _key
    _key = key
