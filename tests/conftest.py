"""What the markers mean, in one hook. `pytest -m "not weights"` is the quick run, offline.

`gpu` tests skip themselves where there is no CUDA device. `weights` tests never skip: they fetch
the default target on first use and fail where it cannot be had, so a green run has run them.
"""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch

from tests.interpreted import collect

DEFAULT_TARGET = "smollm2-135m"


@functools.cache  # one attempt a run: every later test hears of the same failure at once
def _why_default_target_is_missing() -> str | None:
    # Imported here so that the quick run does not depend on the loaders.
    from flashdraft.errors import FlashdraftError
    from flashdraft.models.sources import resolve_source

    try:
        resolve_source(DEFAULT_TARGET)
    except (FlashdraftError, OSError) as error:
        return f"the default target {DEFAULT_TARGET!r} cannot be had: {error}"
    return None


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets its background jobs ignore Ctrl-C, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of several: each has a processor, as its children
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who may take long goes first, so that no process has one to end when the others are done."""

    def limit(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return float(marker.args[0]) if marker else float(item.config.getini("timeout"))

    longest: dict[object, float] = {}
    for item in items:
        longest[item.path] = max(longest.get(item.path, 0.0), limit(item))
    items.sort(key=lambda item: -longest[item.path])  # stable: within a file as it is written


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none here")
    if item.get_closest_marker("weights") and (reason := _why_default_target_is_missing()):
        remedy = 'pytest -m "not weights" leaves these tests out'
        pytest.fail(f"{reason} ({remedy})", pytrace=False)


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of a module's checks in Triton's interpreter, by name; see interpreted.py."""
    return collect(str(request.path))
