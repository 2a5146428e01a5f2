"""What the fork server imports once, so that a rank starts in milliseconds with everything in place.

torch's own late imports are here too: the first optimizer of a process imports torch._dynamo, which takes a second.
A module that does not import here is left to the rank that needs it, whose error then names the test.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import sley_core


def modules() -> Iterator[str]:
    """Names of what a rank of a test is likely to need: pytest, torch, and all of core."""
    yield from ("pytest", "torch.distributed", "torch._dynamo")
    for module in pkgutil.walk_packages(sley_core.__path__, "sley_core.", onerror=_leave_it):
        if not module.name.endswith("__main__"):
            yield module.name


def _leave_it(name: str) -> None:
    """A package that does not import is not walked."""


for _name in modules():
    with contextlib.suppress(Exception):
        import_module(_name)
