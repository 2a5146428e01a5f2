"""What the tests of the start share."""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sley_core.comm import startup
from train_cli.start import meeting, reach

sys.path.append(str(Path(__file__).parent / "own"))  # modules of tests import from there while they are collected


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "PATIENCE_S", 1.0)
    monkeypatch.setattr(meeting, "STRAGGLERS_S", 0.1)


@pytest.fixture
def port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    startup.forget()  # the system may give a port twice
    return found
