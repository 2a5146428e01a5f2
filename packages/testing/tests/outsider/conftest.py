"""Plugins of somebody else's: beside core, and no other package of ours is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def installed(plugin_folder: Callable[..., None]) -> None:
    own = Path(__file__).parent / "own"
    plugin_folder(own, wave="sley_wave.plugin", pickles="sley_pickles.plugin", broken="broken_parts")
