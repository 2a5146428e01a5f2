"""A plugin of pytest for the session `isolated`: a few tests of each file, of each the first case; of drawn examples, few.

A package without the others fails where it imports one, or lacks a file: the tests of one file meet that alike, and the
session `tests` has run all of them. `nox -s tests -- packages/pp` runs all of a package.
"""

from collections import defaultdict
from pathlib import Path

import pytest

FEW = 5
"""Drawn examples of a test."""

OF_A_FILE = 2
"""Tests of a file: the first and the last."""


@pytest.hookimpl(trylast=True)  # of those that pytest's own options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects all but those tests, and lets hypothesis draw few examples of each."""
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
    by_file: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in reversed(first.values()):
        by_file[item.path].append(item)
    kept = {item for every in by_file.values() for item in spread(every)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
    for item in items:
        function = getattr(item, "function", None)
        own = getattr(function, "_hypothesis_internal_use_settings", None)  # private: a decorator of the test has set it
        if own is not None:
            function._hypothesis_internal_use_settings = type(own)(own, max_examples=min(own.max_examples, FEW))


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns at most `OF_A_FILE` of `items`, the first and the last among them."""
    if len(items) <= OF_A_FILE:
        return items
    return [items[at * (len(items) - 1) // (OF_A_FILE - 1)] for at in range(OF_A_FILE)]
