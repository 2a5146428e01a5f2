"""A plugin of pytest for the session `isolated`: the first test of each file, its first case; of drawn examples, few.

A package without the others fails if it imports one, or lacks a file: the tests of a file meet that alike, and the session
`tests` has run all of them. `nox -s tests -- packages/pp` runs all of a package.
"""

from pathlib import Path

import pytest

FEW = 5
"""The most examples that hypothesis draws for a test."""


@pytest.hookimpl(trylast=True)  # of the tests that pytest's own options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects all tests but the first of each file, and lets hypothesis draw few examples."""
    first: dict[Path, pytest.Item] = {}
    for item in items:
        first.setdefault(item.path, item)
    config.hook.pytest_deselected(items=[item for item in items if item is not first[item.path]])
    items[:] = first.values()
    for item in items:
        function = getattr(item, "function", None)
        own = getattr(function, "_hypothesis_internal_use_settings", None)  # private: a decorator of the test has set it
        if own is not None:
            function._hypothesis_internal_use_settings = type(own)(own, max_examples=min(own.max_examples, FEW))
