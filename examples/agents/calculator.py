"""An environment in the form of TRL's: its public methods are the tools of the model."""

from typing import Any


class Calculator:
    """Multiplies numbers and takes the answer. Only the right answer has a reward."""

    def reset(self, reward_model: dict[str, Any], **row: Any) -> None:
        self.truth = int(reward_model["ground_truth"])
        self.answer: int | None = None

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return int(a) * int(b)  # the model may write text, of which Python makes copies

    def submit(self, value: int) -> str:
        """Give the answer.

        Args:
            value: The answer.
        """
        self.answer = value
        return "taken"

    def get_reward(self) -> float:
        return float(self.answer == self.truth)
