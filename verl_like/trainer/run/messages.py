"""Messages to the user on standard error, for what no record shows."""

import sys


def say(message: str, exit_code: int = 0) -> int:
    """Writes a message to standard error, and returns the exit code."""
    sys.stderr.write(f"\nverl_like: {message}\n")
    return exit_code
