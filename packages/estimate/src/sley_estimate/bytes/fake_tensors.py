"""Tensors without values whose memory is counted: torch's fake tensors, seen as each operation makes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException, in_kernel_invocation_manager

from sley_core.model.tensors import PLAIN
from sley_estimate.bytes.ledger import Ledger
from sley_estimate.bytes.recipes import Recipes
from sley_estimate.bytes.scratch import scratch_bytes

MOST_NUMBERS = 1 << 20
"""Elements of a tensor that is computed from the batch alone, whose numbers are computed too: lengths, bounds, positions."""


_DEVICE = torch.ops.prim.device.default
_TAKES_STORAGE = {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's
    """Within it new tensors are fake; outside of it too, operations on fake ones come here. All memory goes into `ledger`.

    listener: is told of each operation: what `recipes` know it by or None, its arguments and its result. recipes: what was made
    once is made again without asking torch; the same, and faster. has_scratch: whether memory counts that the CPU's operators
    take inside themselves. An operation whose result depends on values raises torch's DataDependentOutputException, or the
    like.
    """

    def __init__(self, ledger: Ledger, recipes: Recipes | None = None, *, has_scratch: bool = True) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.ledger = ledger
        self.listener: Callable[[Hashable | None, Any, Any, Any, Any], None] | None = None
        self.recipes = recipes
        self.has_scratch = has_scratch
        self._depth = 0
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False. torch asks, and would guard `__torch_dispatch__` from being compiled: `dispatch` is
        guarded instead.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked more often than all else together
            return args[0].fake_device
        # Modes of functions, such as those of kernels, need not hear of each size that is asked.
        with torch._C.DisableTorchFunction():
            return self.dispatch(func, types, args, kwargs)

    def made(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """Returns a fake tensor on `device` with the shape, strides and dtype of `elem`, which is on meta. It is not counted
        here.

        It is `FakeTensor(self, elem, device)` in a fifth of the time: attributes are copied from the first one made for
        `device`.
        """
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self, elem, device)))
        fake: FakeTensor = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes[device])
        return fake

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch's
    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation of torch without values and returns its result, made anew from `recipes` where these know the
        call.

        Counts new memory, and what the operator takes while it runs, in the ledger, and tells the listener. What torch calls
        within another operation is a part of that and is neither counted nor told. Of `set_` with a storage only the memory is
        counted.
        """
        kwargs = kwargs or {}
        if func in _TAKES_STORAGE:  # torch's cache of results would keep the storage, as a part of its key
            with in_kernel_invocation_manager(self):
                func(*args, **kwargs)
            self._see(args[0])
            return args[0]
        if self.recipes is None or self._depth:
            return self._ask(func, types, args, kwargs)
        key = self.recipes.key(func, args, kwargs)
        if key is None:
            return self._ask(func, types, args, kwargs)
        made = self.recipes.make(self, key, args, kwargs)
        if made is not None:
            result, news, scratch = made
            for new in news:
                self.ledger.see(new)
            self.ledger.pass_by(scratch)
            if self.listener is not None:
                self.listener(key, func, args, kwargs, result)
            return result
        found = self._ask(func, types, args, kwargs, key)
        self.recipes.remember(key, args, kwargs, found, self._scratch(func, args, kwargs, found))
        return found

    def _ask(self, func: Any, types: Any, args: Any, kwargs: Any, key: Hashable | None = None) -> Any:
        """Asks torch for the result of an operation and returns it; None for one that returns nothing and that torch cannot run
        without values, such as a fused optimizer's step.

        Unless it is called within another operation, also counts the result's memory and the operator's scratch bytes in the
        ledger, and tells the listener, with the `key` that recipes know the call by. Raises UnsupportedOperatorException for
        any other operation that torch cannot run without values.
        """
        self._depth += 1
        try:
            found = super().dispatch(func, types, args, kwargs)
        except UnsupportedOperatorException:
            if func._schema.returns:
                raise
            found = None  # a fused optimizer's step: it writes to what it is given
        finally:
            self._depth -= 1
        if not self._depth:  # what torch decomposes on the way is one operation
            self._see(found)
            self.ledger.pass_by(self._scratch(func, args, kwargs, found))
            if self.listener is not None:
                self.listener(key, func, args, kwargs, found)
        return found

    def _scratch(self, func: Any, args: Any, kwargs: Any, found: Any) -> int:
        """Returns the bytes that the operator takes while it runs, beside its result; 0 unless `has_scratch`."""
        return scratch_bytes(func, args, kwargs, found) if self.has_scratch else 0

    def _see(self, found: Any) -> None:
        """Counts the memory of a result: of a fake tensor, or of each in a tuple or list, however deep; nothing else counts."""
        if isinstance(found, FakeTensor):
            self.ledger.see(found)
        elif isinstance(found, tuple | list):
            for each in found:
                self._see(each)

    def uncounted(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a new fake tensor, [numel], whose memory the ledger never counts: it is none of the
        device's, or another's.
        """
        with self:
            fake: Any = super().dispatch(torch.ops.aten.empty.memory_format, (), ([numel],), {"dtype": dtype})
        self.ledger.ignore(fake)
        found: Tensor = fake
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Patches torch within the block: the ledger hears of storages that change their size without an operation, and of
        those that torch refers to weakly; fake tensors have addresses, which torch gives as 0 for all, and count as plain ones.
        """
        kind, ledger = torch.UntypedStorage, self.ledger
        resize, address, refer = kind.resize_, kind.data_ptr, kind._weak_ref

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            found = resize(storage, num_bytes)
            ledger.resized(storage)
            return found

        def referred(storage: torch.UntypedStorage) -> Any:
            if storage.device.type == "meta":
                ledger.ask(storage)
            return refer(storage)

        def address_of(storage: torch.UntypedStorage) -> int:
            return ledger.address(storage) if storage.device.type == "meta" else address(storage)

        def address_in(tensor: FakeTensor) -> int:
            start = ledger.address(tensor.untyped_storage())
            return start + int(tensor.storage_offset()) * tensor.element_size() if start else 0

        changes = {
            (torch.UntypedStorage, "resize_"): resized,
            (torch.UntypedStorage, "data_ptr"): address_of,
            (torch.UntypedStorage, "_weak_ref"): referred,
            (FakeTensor, "data_ptr"): address_in,
        }
        with ExitStack() as stack:
            stack.callback(PLAIN.discard, FakeTensor)
            PLAIN.add(FakeTensor)
            for (owner, name), changed in changes.items():
                stack.enter_context(patch.object(owner, name, changed))
            yield

    def of(self, value: Tensor, *, counts: bool = False) -> Tensor:
        """Returns a fake tensor that stands for `value` and keeps its numbers; so do results that are computed on the CPU from
        such tensors alone, up to `MOST_NUMBERS` elements.

        counts: whether the ledger counts its memory; else that is taken for the memory of `value` and never counted.
        """
        fake = self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)
        if counts:
            self.ledger.see(fake)
        else:
            self.ledger.ignore(fake)
        return fake

    def may_turn_const(self, t: Tensor) -> bool:
        """Returns whether the numbers of a result `t` are kept: of one on the CPU that has numbers and at most `MOST_NUMBERS`
        elements. torch asks, whose own limit is one element.
        """
        return t.numel() <= MOST_NUMBERS and not self.is_our_fake(t) and t.device.type == "cpu" and not t.is_sparse
