"""Stacks of tests that hang: those of a campaign are printed later than others', which a long one would be for nothing."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest

CAMPAIGN_S = 1200.0
"""More than twice what the longest takes on two cores; `faulthandler_timeout` in pyproject.toml is for all other tests."""

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the way to the terminal: a test's own standard error is captured."""
    if sys.__stderr__ is not None:
        config.stash[_stderr] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    if _stderr in config.stash:
        os.close(config.stash[_stderr])


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Sets the alarm of a campaign's test anew; pytest, which has set it for all tests, takes it back at the end."""
    if item.get_closest_marker("campaign") and _stderr in item.config.stash:
        faulthandler.dump_traceback_later(CAMPAIGN_S, file=item.config.stash[_stderr])
    return (yield)
