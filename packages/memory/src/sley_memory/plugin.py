"""What the plugin `memory` has."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import MemoryPoolRecord
from sley_memory.config import SizeClassesConfig


@hookimpl
def sley_memory_pools() -> list[MemoryPoolRecord]:
    return [
        MemoryPoolRecord(
            name="size_classes",
            config=SizeClassesConfig,
            build="sley_memory.size_classes:SizeClasses",
            summary="Keeps blocks by rounded size and lends views of them, to users of many sizes.",
        )
    ]
