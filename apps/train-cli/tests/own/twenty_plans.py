"""Twenty plans of one process, over policies, types, sizes and what leaves the device, to compare with their estimates.

Large ones are for a device: gigabytes, so that what an allocator rounds up does not decide, and steps of 0.03 to 0.5 s on one.
Small ones, of the same kinds, are megabytes, for the tests of a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sley_testing.plans import Tables, changed, small_plan


class Shape(NamedTuple):
    """A decoder and its sequences. small: by how much less of each width, and of a sequence, the small one has."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    sequence: int
    tied: bool = False


WIDE = Shape(3, 2048, 16, 16, 2048)
DEEP = Shape(10, 1024, 16, 16, 1024)
GROUPED = Shape(4, 1536, 12, 4, 2048, tied=True)

VOCABULARY, SMALL_VOCABULARY = 16384, 512
SMALLER = 16
"""Of widths; sequences are as much shorter."""

FEWER = 4
"""Samples of a micro-batch of a small one."""

KEEP, RECOMPUTE, HALF = {}, {"use": "core.recompute"}, {"use": "core.recompute", "fraction": 0.5}
SELECTIVE, HOST = {"use": "memory.selective"}, {"use": "memory.host"}
STATES = [{"use": "memory.optimizer_states", "when": "between_steps"}]
OPTIMIZER = [{"use": "memory.host_optimizer"}]
SGD = {"use": "core.sgd", "lr": 1e-4, "momentum": 0.9}
PACKED = {"documents": "pack"}


class Kind(NamedTuple):
    """One plan. micro: samples of a micro-batch. count: micro-batches of a step. more: what tables of it have besides."""

    compute: str
    shape: Shape
    micro: int
    count: int
    activations: dict[str, Any]
    offload: list[dict[str, Any]] | None = None
    more: dict[str, Any] | None = None


KINDS: dict[str, Kind] = {
    "wide": Kind("bf16", WIDE, 4, 1, KEEP),
    "wide, four micro-batches": Kind("bf16", WIDE, 4, 4, KEEP),
    "wide, recomputed": Kind("bf16", WIDE, 8, 2, RECOMPUTE),
    "wide, selective": Kind("bf16", WIDE, 8, 2, SELECTIVE),
    "wide, activations on the host": Kind("bf16", WIDE, 4, 2, HOST),
    "wide, states away between steps": Kind("bf16", WIDE, 4, 4, KEEP, STATES),
    "wide, recomputed, states away": Kind("bf16", WIDE, 8, 4, RECOMPUTE, STATES),
    "wide, optimizer on the host": Kind("bf16", WIDE, 4, 2, KEEP, OPTIMIZER),
    "deep": Kind("bf16", DEEP, 8, 1, KEEP),
    "deep, half recomputed": Kind("bf16", DEEP, 16, 2, HALF),
    "deep, selective, documents": Kind("bf16", DEEP, 8, 2, SELECTIVE, None, {"data": PACKED}),
    "deep, activations on the host": Kind("bf16", DEEP, 8, 1, HOST),
    "deep, activations and states away": Kind("bf16", DEEP, 8, 2, HOST, STATES),
    "grouped and tied": Kind("bf16", GROUPED, 4, 2, KEEP),
    "grouped, recomputed, SGD, not clipped": Kind("bf16", GROUPED, 8, 1, RECOMPUTE, None, {"optimizer": SGD}),
    "grouped, documents": Kind("bf16", GROUPED, 4, 2, KEEP, None, {"data": PACKED}),
    "fp32, wide": Kind("fp32", WIDE, 2, 1, KEEP),
    "fp32, wide, recomputed": Kind("fp32", WIDE, 4, 1, RECOMPUTE),
    "fp32, deep, selective, states away": Kind("fp32", DEEP, 4, 2, SELECTIVE, STATES),
    "fp32, grouped, activations on the host": Kind("fp32", GROUPED, 2, 1, HOST),
}
assert len(KINDS) == 20


def twenty_plans(device: str, *, is_large: bool) -> dict[str, Tables]:
    """Returns the tables of all of them on `device`, by name. They read Python's own library as text."""
    return {name: _tables(kind, device, is_large=is_large) for name, kind in KINDS.items()}


def _tables(kind: Kind, device: str, *, is_large: bool) -> Tables:
    less = 1 if is_large else SMALLER
    shape, more = kind.shape, kind.more or {}
    micro = kind.micro if is_large else max(1, kind.micro // FEWER)
    model = {"use": "models.llama", "num_layers": shape.layers, "hidden": shape.hidden // less, "heads": shape.heads}
    model |= {"kv_heads": shape.kv_heads, "vocab_size": VOCABULARY if is_large else SMALL_VOCABULARY}
    data = {"use": "data.text", "source": "python-stdlib", "sequence": shape.sequence // less, "documents": "cut"}
    offload = [table if is_large else table | {"bucket_mb": 0.5} for table in kind.offload or ()]
    return changed(
        small_plan(),
        run={"name": "estimated", "steps": 100, "device": device},
        model=model | {"tie_embeddings": shape.tied},
        data=data | more.get("data", {}),
        batch={"global_size": micro * kind.count, "micro_size": micro},
        optimizer=more.get("optimizer", {"use": "core.adamw", "lr": 1e-4, "clip_norm": 1.0}),
        precision={"compute": kind.compute},
        activations=kind.activations or None,
        offload=offload or None,
    )
