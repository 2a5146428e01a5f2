"""What the tests of the test kit share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def parts(plugin_folder: Callable[..., None]) -> None:
    """The plugin `parts`: for each kind a part that is right, and some that are wrong in one way each."""
    plugin_folder(Path(__file__).parent / "own", parts="parts_plugin")
