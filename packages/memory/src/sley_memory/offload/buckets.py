"""Cuts what an optimizer steps into buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sley_core.api.memory import Stepped


def by_bytes(stepped: Iterable[Stepped], num_bytes: int) -> list[list[Stepped]]:
    """Returns `stepped` in runs of at most `num_bytes` of parameters; a larger one is alone."""
    buckets: list[list[Stepped]] = []
    size = 0
    for one in stepped:
        own = one.parameter.numel() * one.parameter.element_size()
        if not buckets or size + own > num_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(one)
        size += own
    return buckets
