"""Which storages are alive, of those that were made while this looks on; keeps none of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sley_core.comm.copies import storage_id


class Storages(TorchDispatchMode):
    """`with Storages() as storages: ...; storages.num_bytes()`."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._but: set[int] = set()

    def but(self, tensors: Iterable[Tensor]) -> None:
        """Does not count the storages of `tensors`."""
        self._but |= {storage_id(tensor) for tensor in tensors}

    def num_bytes(self) -> int:
        """Returns the bytes of the storages that are alive."""
        return sum(size for ref, size in self._seen.values() if not ref.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(one) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        for value in tree_iter(result):
            if isinstance(value, Tensor) and type(value) is Tensor:
                storage = value.untyped_storage()
                # What an operation only passes on was made before: weights, batches, buffers of the host.
                if storage._cdata not in self._but | given and storage._cdata not in self._seen:
                    self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result
