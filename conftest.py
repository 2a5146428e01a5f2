"""What is a campaign's: cases beyond a test's sample, and a later alarm for tests that hang; what no test looks through."""

import faulthandler
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

CAMPAIGN_S = 1200.0
"""More than twice what the longest takes on two cores; `faulthandler_timeout` in pyproject.toml is for all other tests."""

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the way to the terminal, since a test's own standard error is captured; switches hypothesis' deadlines off."""
    if sys.__stderr__ is not None:
        config.stash[_stderr] = os.dup(sys.__stderr__.fileno())
    if find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("sley", deadline=None)  # a loaded machine is slow, not wrong
        settings.load_profile("sley")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _stderr in config.stash:
        os.close(config.stash[_stderr])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keeps Python's collector away from what is there for good: modules, and the tests.

    There are over half a million such objects. To look through them takes a third of a second, each time that a test, or the
    collector by itself, looks for garbage; a leak of a test's own is found as before. What tests import later is as much again:
    the collector looks through all that has lived for long a twentieth as often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:1], 20, 100)
        gc.enable()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Sets the alarm of a campaign's test anew; pytest, which has set it for all tests, takes it back at the end."""
    if item.get_closest_marker("campaign") and _stderr in item.config.stash:
        faulthandler.dump_traceback_later(CAMPAIGN_S, file=item.config.stash[_stderr])
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sample(n)` keeps n cases; the rest are a campaign's."""
    cases: dict[tuple[pytest.Item | None, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("campaign"):
            cases[item.parent, getattr(item, "originalname", item.name)].append(item)
    for every in cases.values():
        marker = every[0].get_closest_marker("sample")
        assert marker is not None, every[0]
        (wanted,) = marker.args
        kept = sample([parameters(item) for item in every], wanted)
        for at, item in enumerate(every):
            if at not in kept:
                item.add_marker(pytest.mark.campaign)


def parameters(item: pytest.Item) -> set[tuple[str, str]]:
    """The parameters of a case, each with its value in words: values that are written twice are the same."""
    callspec = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def sample(cases: list[set[tuple[str, str]]], wanted: int) -> set[int]:
    """Which cases to keep: the first, then those with most values that none before has; of equals, the farthest from all kept.

    cases: of each its parameters. So each value comes as soon as `wanted` allows.
    """
    kept, seen = {0}, set(cases[0])
    while len(kept) < min(wanted, len(cases)):
        left = [at for at in range(len(cases)) if at not in kept]
        best = max(left, key=lambda at: (len(cases[at] - seen), min(abs(at - other) for other in kept)))
        kept.add(best)
        seen |= cases[best]
    return kept
