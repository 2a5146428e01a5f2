"""A plugin of pytest for the session `isolated`: of a test with parameters, the first case; of drawn examples, few."""

from __future__ import annotations

import pytest

FEW = 5


@pytest.hookimpl(trylast=True)  # of those that pytest's own options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects all cases of a test but its first, and lets hypothesis draw few examples of it."""
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
    for item in items:
        function = getattr(item, "function", None)
        own = getattr(
            function, "_hypothesis_internal_use_settings", None
        )  # private: a decorator of the test has set it
        if own is not None:
            function._hypothesis_internal_use_settings = type(own)(own, max_examples=min(own.max_examples, FEW))
