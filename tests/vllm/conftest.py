"""Tests against a real vLLM on the CPU, in an environment of its own (`make test-vllm`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.vllm_processes import VERSION, find_python


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM; without it the test is skipped."""
    python = find_python()
    if python is None:
        pytest.skip(f"there is no environment with vLLM {VERSION} here; `make test-vllm` makes it")
    return python
