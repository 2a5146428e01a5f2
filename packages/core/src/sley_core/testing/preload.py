"""What the fork server imports once, so that a rank starts in milliseconds with everything in place.

A module that does not import here is left to the rank that needs it, whose error then names the test.
"""

from __future__ import annotations

import contextlib
from importlib import import_module

MODULES = (
    "pytest",
    "torch",
    "torch.distributed",
    "torch.testing",
    "sley_core.testing.rank_process",
    "sley_core.testing.recorder",
    "sley_core.testing.parity",
    "sley_core.plan.plan",
    "sley_core.assemble",
    "sley_core.run",
)

for _name in MODULES:
    with contextlib.suppress(Exception):
        import_module(_name)
