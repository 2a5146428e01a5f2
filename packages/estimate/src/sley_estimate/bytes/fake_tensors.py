"""Counts the memory of torch's fake tensors, and remembers results of operations: a model's layers repeat them.

torch's own cache of fake results takes longer to make a key than the operation. Here a call is known by operator, sizes,
strides, offsets, dtypes and plain arguments; its result is new memory, a view of an argument, or an argument. Other calls are
not remembered: results with values, arguments that are no fake tensors, in-place changes of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException, in_kernel_invocation_manager

from sley_core.comm.copies import storage_id
from sley_core.model.tensors import PLAIN
from sley_estimate.bytes.ledger import Ledger, scratch_bytes

MOST_VALUES = 1 << 20
"""Elements of a tensor computed from the batch alone whose values are kept: lengths, bounds, positions."""

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_TAKES_STORAGE = {_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset}
_PLAIN_KINDS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_NEVER = {_aten._local_scalar_dense.default, _aten.resize_.default}


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's
    """Makes new tensors fake within the mode and counts their memory in `ledger`, as that of operations on fake tensors
    outside.

    listener: called after each operation with its key in `recipes` or None, operator, arguments, keyword arguments and result.
    has_scratch: whether memory inside the CPU's operators counts. An operation whose result depends on values raises torch's
    DataDependentOutputException or the like.
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
        """Returns False: torch would guard `__torch_dispatch__` from being compiled; `dispatch` is guarded instead."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # more often than all other operators together
            return args[0].fake_device
        with torch._C.DisableTorchFunction():  # function modes need not see each query of a size
            return self.dispatch(func, types, args, kwargs)

    def fake(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """Returns `FakeTensor(self, elem, device)`, uncounted, in a fifth of the time: attributes are copied from an earlier
        one. elem: on meta.
        """
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self, elem, device)))
        fake: FakeTensor = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes[device])
        return fake

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch's
    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation without values, from `recipes` if they know the call, and returns its result. Counts new memory
        and scratch in the ledger and calls the listener. Operations that torch calls within another are part of that one.
        """
        kwargs = kwargs or {}
        if func in _TAKES_STORAGE:  # torch's cache of results would keep the storage in its key
            with in_kernel_invocation_manager(self):
                func(*args, **kwargs)
            self._see(args[0])
            return args[0]
        if self.recipes is None or self._depth:
            return self._run(func, types, args, kwargs)
        key = self.recipes.key(func, args, kwargs)
        if key is None:
            return self._run(func, types, args, kwargs)
        known = self.recipes.make(self, key, args, kwargs)
        if known is not None:
            result, news, scratch = known
            for new in news:
                self.ledger.see(new)
            self.ledger.scratch(scratch)
            if self.listener is not None:
                self.listener(key, func, args, kwargs, result)
            return result
        result = self._run(func, types, args, kwargs, key)
        self.recipes.remember(key, args, kwargs, result, self._scratch(func, args, kwargs, result))
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, key: Hashable | None = None) -> Any:
        """Lets torch run an operation and returns its result; None for one that returns nothing and that torch cannot run
        without values, such as a fused optimizer's step. Raises UnsupportedOperatorException for other such operations.
        """
        self._depth += 1
        try:
            result = super().dispatch(func, types, args, kwargs)
        except UnsupportedOperatorException:
            if func._schema.returns:
                raise
            result = None
        finally:
            self._depth -= 1
        if not self._depth:
            self._see(result)
            self.ledger.scratch(self._scratch(func, args, kwargs, result))
            if self.listener is not None:
                self.listener(key, func, args, kwargs, result)
        return result

    def _scratch(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        return scratch_bytes(func, args, kwargs, result) if self.has_scratch else 0

    def _see(self, result: Any) -> None:
        if isinstance(result, FakeTensor):
            self.ledger.see(result)
        elif isinstance(result, tuple | list):
            for each in result:
                self._see(each)

    def uncounted(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a new fake tensor, [numel], that the ledger never counts."""
        with self:
            fake: Any = super().dispatch(_aten.empty.memory_format, (), ([numel],), {"dtype": dtype})
        self.ledger.ignore(fake)
        result: Tensor = fake
        return result

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Patches torch in the block: the ledger sees storages resized or weakly referenced; fake tensors have addresses."""
        kind, ledger = torch.UntypedStorage, self.ledger
        resize, address, refer = kind.resize_, kind.data_ptr, kind._weak_ref

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            ledger.resized(storage)
            return result

        def referred(storage: torch.UntypedStorage) -> Any:
            if storage.device.type == "meta":
                ledger.poll(storage)
            return refer(storage)

        def storage_address(storage: torch.UntypedStorage) -> int:
            return ledger.address(storage) if storage.device.type == "meta" else address(storage)

        def tensor_address(tensor: FakeTensor) -> int:
            start = ledger.address(tensor.untyped_storage())
            return start + int(tensor.storage_offset()) * tensor.element_size() if start else 0

        changes = {
            (torch.UntypedStorage, "resize_"): resized,
            (torch.UntypedStorage, "data_ptr"): storage_address,
            (torch.UntypedStorage, "_weak_ref"): referred,
            (FakeTensor, "data_ptr"): tensor_address,
        }
        with ExitStack() as stack:
            stack.callback(PLAIN.discard, FakeTensor)
            PLAIN.add(FakeTensor)
            for (owner, name), changed in changes.items():
                stack.enter_context(patch.object(owner, name, changed))
            yield

    def of(self, value: Tensor, *, counts: bool = False) -> Tensor:
        """Returns a fake tensor that keeps the values of `value`; results computed on the CPU from such tensors alone keep
        theirs, up to `MOST_VALUES` elements. counts: whether the ledger counts its memory.
        """
        fake = self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)
        if counts:
            self.ledger.see(fake)
        else:
            self.ledger.ignore(fake)
        return fake

    def may_turn_const(self, t: Tensor) -> bool:
        """Returns whether the values of a result are kept; torch's own limit is one element."""
        return t.numel() <= MOST_VALUES and not self.is_our_fake(t) and t.device.type == "cpu" and not t.is_sparse


class _UnknownError(Exception):
    """The call cannot be remembered."""


class Recipes:
    """Remembers results of operations, for any `FakeTensors`. num_used: calls that were answered from memory."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self.num_used = 0

    def learn(self, other: Recipes) -> None:
        """Adds what `other` remembers."""
        self._known |= other._known

    def key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
        """Returns the key of a call, which can be pickled; None for a call that is never remembered."""
        name = _operator_name(func)
        if name is None:
            return None
        try:
            named = tuple((key, _key(value)) for key, value in kwargs.items()) if kwargs else ()
            return name, tuple(map(_key, args)), named
        except _UnknownError:
            return None

    def make(
        self, mode: FakeTensors, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Sequence[Tensor], int] | None:
        """Returns the result of a remembered call, made of fake tensors of `mode`; those of its tensors that have new memory,
        which the caller counts; and the operator's scratch bytes. None if the call is not remembered.
        """
        known = self._known.get(key)
        if known is None:
            return None
        self.num_used += 1
        inputs = _fake_tensors(args, kwargs)
        new: list[Tensor] = []
        results = [_result(mode, recipe, inputs, new) for recipe in known[1]]
        return (known[0](results) if known[0] is not None else results[0]), new, known[2]

    def remember(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any], result: Any, scratch: int) -> None:
        """Remembers the result of a call, unless it cannot be made again."""
        inputs = _fake_tensors(args, kwargs)
        kind = type(result) if isinstance(result, tuple | list) else None
        leaves = result if kind else [result]
        try:
            recipes = [_recipe(leaf, inputs) for leaf in leaves]
        except _UnknownError:
            return
        places = [storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        of_tensors = [recipe for recipe in recipes if recipe is not None]
        news = [place for place, recipe in zip(places, of_tensors, strict=True) if recipe[0] == "new"]
        if kind in (None, tuple, list) and len(set(news)) == len(news):
            self._known[key] = kind, recipes, scratch


@cache
def _operator_name(func: Any) -> str | None:
    is_never = func in _NEVER or torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags
    return None if is_never else func.name()


def _result(mode: FakeTensors, recipe: Any, inputs: Sequence[FakeTensor], new: list[Tensor]) -> Any:
    """Returns one result as its recipe says; adds one with new memory to `new`."""
    if recipe is None:
        return None
    kind, what, size, stride, dtype, device = recipe
    if kind == "same":
        return inputs[what]
    elem = torch.empty_strided(size if kind == "new" else (0,), stride if kind == "new" else (1,), dtype=dtype, device="meta")
    if kind == "view":
        at, offset = what
        elem.set_(inputs[at].untyped_storage(), offset, size, stride)
    fake = mode.fake(elem, device)
    if kind == "new":
        new.append(fake)
    return fake


def _key(value: Any) -> Hashable:
    """Returns the key of one argument. Raises _UnknownError for a tensor with values, or another kind of object."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _UnknownError
        special = value.is_conj() or value.is_neg()
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, special
    if kind is list or kind is tuple:
        return kind, tuple(map(_key, value))
    if kind in _PLAIN_KINDS:
        return kind, value
    raise _UnknownError


def _fake_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[FakeTensor]:
    """Returns the fake tensors of a call in order, those in lists included."""
    tensors: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, FakeTensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [each for each in value if isinstance(each, FakeTensor)]
    return tensors


def _recipe(result: Any, inputs: Sequence[FakeTensor]) -> Any:
    """Returns (kind, place, sizes, strides, dtype, device) of a result: kind "same" for an argument, "view" of one, or "new".
    Raises _UnknownError for a result that is more than memory and a shape.
    """
    if result is None:
        return None
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        raise _UnknownError
    if result.is_conj() or result.is_neg() or result.requires_grad:
        raise _UnknownError
    for at, tensor in enumerate(inputs):
        if result is tensor:
            return "same", at, None, None, None, None
    place = storage_id(result)
    size, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.fake_device
    for at, tensor in enumerate(inputs):
        if storage_id(tensor) == place:
            return "view", (at, result.storage_offset()), size, stride, dtype, device
    needed = torch.empty_strided(size, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
    if result.storage_offset() or result.untyped_storage().nbytes() != needed:
        raise _UnknownError
    return "new", None, size, stride, dtype, device
