"""Turns torch's errors of collectives into errors that name the operation, the group and what was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sley_core.comm.members import Members
from sley_core.errors import RunError

HINT = "another rank of the group stopped, or did not come within [limits] collective_timeout_s"


def guarded(call: Callable[[], Any], operation: str, members: Members, what: str) -> Any:
    """Returns `call()`; torch's RuntimeError becomes RunError `collective-failed`: which operation, on which group, of what."""
    try:
        return call()
    except RuntimeError as error:
        raise RunError(
            "collective-failed",
            f"{operation} of {what} over {members} failed on rank {members.rank}: {first_line(error)}",
            hint=HINT,
        ) from error


def first_line(error: BaseException) -> str:
    """Returns what an error of torch says, without the C++ stack that follows it; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
