"""Fixtures of the tests of the test kit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def parts(plugin_folder: Callable[..., None]) -> None:
    """Installs the plugin `parts`: a correct part of each type, and parts with one bug each."""
    plugin_folder(Path(__file__).parent / "own", parts="parts_plugin")
