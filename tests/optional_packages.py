"""Packages without which some tests are skipped."""

import importlib.util

import pytest

# Without importing vLLM, which takes two seconds in each process that collects tests.
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
