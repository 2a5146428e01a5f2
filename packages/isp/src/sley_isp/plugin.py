"""What the plugin `isp` has."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import MemoryPoolRecord, WeightCommunicatorRecord
from sley_isp.config import CommunicatorConfig, FreshConfig, SlotsConfig


@hookimpl
def sley_weight_communicators() -> list[WeightCommunicatorRecord]:
    return [
        WeightCommunicatorRecord(
            name="communicator",
            config=CommunicatorConfig,
            build="sley_isp.communicator:Communicator",
            summary="Linears and embeddings, sharded; gathered ahead, gradients reduced during the backward.",
        )
    ]


@hookimpl
def sley_memory_pools() -> list[MemoryPoolRecord]:
    return [
        MemoryPoolRecord(
            name="slots",
            config=SlotsConfig,
            build="sley_isp.pools:Slots",
            summary="Keeps buffers by size and lends them again.",
        ),
        MemoryPoolRecord(name="fresh", config=FreshConfig, build="sley_isp.pools:Fresh", summary="No reuse."),
    ]
