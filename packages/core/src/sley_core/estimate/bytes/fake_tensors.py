"""Tensors without values whose memory is counted: torch's fake tensors, seen as each operation makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sley_core.estimate.bytes.ledger import Ledger


MOST_NUMBERS = 1 << 20
"""Elements of a tensor that is computed from the batch alone, whose numbers are computed too: lengths, bounds, positions."""


class FakeTensors(FakeTensorMode):
    """Within it new tensors are fake; outside of it too, operations on fake ones come here. All memory goes into `ledger`.

    An operation whose result depends on values raises torch's DataDependentOutputException, or the like.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.ledger = ledger
        self._depth = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._depth += 1
        try:
            found = super().dispatch(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        if not self._depth:  # what torch decomposes on the way is one operation
            self._see(found)
        return found

    def _see(self, found: Any) -> None:
        if isinstance(found, FakeTensor):
            self.ledger.see(found)
        elif isinstance(found, tuple | list):
            for each in found:
                self._see(each)

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Within the block the ledger also hears of storages that change their size without an operation."""
        before, ledger = torch.UntypedStorage.resize_, self.ledger

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            found = before(storage, num_bytes)
            ledger.resized(storage)
            return found

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]

    def of(self, value: Tensor) -> Tensor:
        """Returns a fake tensor that stands for `value`, which has numbers; what is computed from such tensors alone has some
        too. Its memory is not counted: it is that of `value`.
        """
        fake = self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)
        self.ledger.ignore(fake)
        return fake

    def may_turn_const(self, t: Tensor) -> bool:
        """Asked by torch, whose own limit is one element: whether the numbers of a result are kept."""
        return t.numel() <= MOST_NUMBERS and not self.is_our_fake(t) and t.device.type == "cpu" and not t.is_sparse
