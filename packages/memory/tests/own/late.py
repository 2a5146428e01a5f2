"""A stream whose copies come as late as its calls permit, and what is wrong if something needed them earlier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class LateEvent:
    def __init__(self, stream: LateStream, end: int) -> None:
        self.stream, self.end = stream, end

    def is_done(self) -> bool:
        return self.stream.num_done >= self.end

    def wait(self) -> None:
        self.stream.run(self.end)

    def hold_device(self) -> None:
        self.stream.run(self.end)


class LateStream:
    """A `CopyStream` that copies when it is waited for, and keeps nothing of what it copies until then.

    faults: copies whose source or target was gone by then. On a device these read or write what another was given.
    """

    def __init__(self) -> None:
        self.num_done = 0
        self.faults: list[str] = []
        self._given: list[tuple[Place, Place]] = []

    def follow(self) -> None: ...

    def after(self, event: Any) -> None:
        event.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        self._given.append((Place(target), Place(source)))

    def record(self) -> LateEvent:
        return LateEvent(self, len(self._given))

    def run(self, end: int) -> None:
        """Does all copies before the number `end`."""
        for number in range(self.num_done, end):
            target, source = (place.tensor() for place in self._given[number])
            if target is None or source is None:
                self.faults.append(f"copy {number} {'writes' if target is None else 'reads'} memory that was freed")
            else:
                target.copy_(source)
        self.num_done = max(self.num_done, end)


class Place:
    """Where a tensor of bytes is, without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.offset, self.shape = tensor.storage_offset(), tensor.shape

    def tensor(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.offset, self.shape)
