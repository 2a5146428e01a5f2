"""What the tests of the test kit share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def naive(plugin_folder: Callable[..., None]) -> None:
    """The plugin `naive`: the simplest parts that hold their contracts, and broken ones."""
    plugin_folder(Path(__file__).parent / "own", naive="naive_plugin")


@pytest.fixture
def wrong(plugin_folder: Callable[..., None]) -> None:
    """The plugin `wrong`: for each kind a part that is right, and some that are wrong in one way each."""
    plugin_folder(Path(__file__).parent / "own", wrong="wrong_plugin")
