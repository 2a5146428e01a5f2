"""Fixtures of the tests of the test kit."""

from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def parts(install_plugins: Callable[..., None]) -> None:
    """Installs the plugin `parts`: a correct part of each type, and parts with one bug each."""
    install_plugins(TESTS / "own", parts="parts_plugin")


@pytest.fixture
def installed(install_plugins: Callable[..., None]) -> None:
    """Installs plugins of a third party, which use only core, and the plugin `broken`."""
    install_plugins(TESTS / "outsider/own", wave="sley_wave.plugin", pickles="sley_pickles.plugin", broken="broken_parts")
