from __future__ import annotations

import socket
from contextlib import closing

import pytest

from sley_core.comm import startup


@pytest.fixture
def port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    startup.forget()  # the system may give a port twice
    return found
