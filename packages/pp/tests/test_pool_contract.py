"""`pp.messages` holds the contract of memory pools."""

from __future__ import annotations

from typing import Any, ClassVar

from sley_testing.pool_contract import MemoryPoolContract


class TestMessages(MemoryPoolContract):
    pool: ClassVar[dict[str, Any]] = {"use": "pp.messages"}
