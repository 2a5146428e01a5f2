"""Opens one rank of a world of any size in this one process, without peers: torch's "fake" backend.

Groups, ranks and shapes are real; no data moves, so that a collective leaves whatever its result held before. For
layout, group tables and orders of collectives, not for numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Makes the default group that of rank `rank` of `size` within the block; afterwards there is none, as before.

        for rank in range(64):
            with fake_world(rank, 64):
                group = dist.new_group([rank ^ 1, rank])

    Raises AssertionError if a default group is up already: worlds do not nest.
    """
    assert not dist.is_initialized(), "a default group is up already, and worlds do not nest"
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
