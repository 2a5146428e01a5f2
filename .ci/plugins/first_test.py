"""A plugin of pytest for the session `isolated`: imports the tests of all files, and runs the first.

A package alone fails if one of its modules imports another package, or if its wheel lacks a file: `alone_program` finds both.
Its tests fail if they import what their group does not name. The session `tests` runs all of them, and so does
`nox -s tests -- packages/pp` for one package alone.
"""

import pytest


@pytest.hookimpl(trylast=True)  # of the tests that pytest's own options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects all tests but the first."""
    config.hook.pytest_deselected(items=items[1:])
    del items[1:]
