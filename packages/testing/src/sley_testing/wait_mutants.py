"""Finds every wait of a program with drawn copies, and leaves one out: a test that then still passes tests nothing.

for site in wait_sites(train):
    with without(site), pytest.raises(AssertionError):
        train()

A wait is a call of `follow`, `after`, `hold_device` or `wait`; its site is the line that calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sley_testing.accesses import replaced
from sley_testing.drawn_copies import DrawnEvent, DrawnStream

WAITS = ((DrawnStream, "follow"), (DrawnStream, "after"), (DrawnEvent, "hold_device"), (DrawnEvent, "wait"))


class Site(NamedTuple):
    """A line that calls `wait`, within `function`."""

    file: str
    line: int
    function: str
    wait: str

    def __str__(self) -> str:
        return f"{Path(self.file).stem}.{self.function}:{self.line} {self.wait}"


def wait_sites(program: Callable[[], object]) -> list[Site]:
    """Calls `program`; returns the sites of the waits that it called, in the order of their first calls."""
    found: dict[Site, None] = {}

    def seen(site: Site) -> bool:
        found[site] = None
        return True

    with _asked(seen):
        program()
    return list(found)


@contextmanager
def without(site: Site) -> Iterator[None]:
    """Returns a context manager in which the waits of `site` do nothing."""
    with _asked(lambda one: one != site):
        yield


@contextmanager
def _asked(wants: Callable[[Site], bool]) -> Iterator[None]:
    """Makes every wait ask, with its site, whether to happen."""

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            caller = sys._getframe(1)
            site = Site(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name, name)
            return method(*args) if wants(site) else None

        return asked

    with ExitStack() as stack:
        for owner, name in WAITS:
            stack.enter_context(replaced(owner, name, wrap))
        yield
