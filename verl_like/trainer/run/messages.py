"""What is told on standard error, where no record shows it."""

import sys


def say(message: str, exit_code: int = 0) -> int:
    """Tells the user on standard error; returns the exit code."""
    sys.stderr.write(f"\nverl_like: {message}\n")
    return exit_code
