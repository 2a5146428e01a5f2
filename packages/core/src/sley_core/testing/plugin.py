"""The pytest plugin `sley`: fixtures whose modules, and torch with them, are imported when a test first asks for them.

pytest loads this before it measures coverage and before any test needs torch, so only pytest is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sley_core.testing.ranks import Ranks


@pytest.fixture
def ranks() -> Callable[..., Ranks]:
    """`ranks(n, timeout_s=60, init=True)` -> `run(function, *args, **kwargs)` -> the results of n ranks, in order."""
    from sley_core.testing.ranks import Ranks

    return Ranks
