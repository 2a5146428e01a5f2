"""What the fork server imports once, so that a rank starts in milliseconds with everything in place.

torch's own late imports are here too: the first optimizer of a process imports torch._dynamo, which takes a second.
A module that does not import here is left to the rank that needs it, whose error then names the test.
"""

from __future__ import annotations

import contextlib
import gc
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import sley_core
from sley_core.discovery import installed


def modules() -> Iterator[str]:
    """Names of what a rank of a test is likely to need: pytest, torch, all of core, and of the plugins that are installed."""
    yield from ("pytest", "torch.distributed", "torch._dynamo", "packaging.requirements")
    yield from _all_of(sley_core)
    for found in installed().values():
        for plugin in found:
            with contextlib.suppress(Exception):
                package = plugin.entry_point.module.partition(".")[0] if plugin.entry_point else ""
                yield from _all_of(import_module(package))


def _all_of(package: ModuleType) -> Iterator[str]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=_leave_it):
        if not module.name.endswith("__main__"):
            yield module.name


def _leave_it(name: str) -> None:
    """A package that does not import is not walked."""


for _name in modules():
    with contextlib.suppress(Exception):
        import_module(_name)

gc.freeze()
"""A rank does not look through, nor copy, what it shares with the others."""
