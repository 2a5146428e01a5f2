"""`isp.slots` and `isp.fresh` hold the contract of memory pools."""

from __future__ import annotations

from typing import Any, ClassVar

from sley_testing.pool_contract import MemoryPoolContract


class TestSlots(MemoryPoolContract):
    pool: ClassVar[dict[str, Any]] = {"use": "isp.slots"}


class TestFresh(MemoryPoolContract):
    pool: ClassVar[dict[str, Any]] = {"use": "isp.fresh"}
