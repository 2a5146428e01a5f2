"""Installs the plugins of a third party, which use only core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def installed(plugin_folder: Callable[..., None]) -> None:
    folder = Path(__file__).parent / "own"
    plugin_folder(folder, wave="sley_wave.plugin", pickles="sley_pickles.plugin", broken="broken_parts")
