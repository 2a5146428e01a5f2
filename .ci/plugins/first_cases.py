"""A plugin of pytest for the session `isolated`: of a test with parameters, the first case."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)  # of those that pytest's own options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects all cases of a test but its first."""
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
