"""Counts the memory of torch's fake tensors, and caches the results of operations, which the layers of a model repeat.

torch has its own cache of fake results, but computing a key for it takes longer than the operation. Here the key of a call
consists of its operator, its plain arguments, and the sizes, strides, offsets, dtypes and devices of its tensors. A cached
result is new memory, a view of an argument, or an argument itself. A call is not cached if its result depends on values, if an
argument is neither a fake tensor without values nor plain, or if it changes a shape in place.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException, in_kernel_invocation_manager

from sley_core.comm.device import storage_id
from sley_core.model.tensors import PLAIN
from sley_estimate.bytes.ledger import Ledger, scratch_bytes

MAX_CONSTANT_NUMEL = 1 << 20
"""The number of elements of the largest tensor whose values are kept if it is computed only from the batch, such as positions.
"""

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_SET_STORAGE_OPS = {_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset}
_PLAIN_TYPES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_UNCACHED_OPS = {_aten._local_scalar_dense.default, _aten.resize_.default}


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes new tensors fake within the mode, and counts their memory in `ledger`. Operations on these tensors also count
    outside the mode.

    listener: a function called after each operation with the key of the call or None, the operator, its arguments, its keyword
    arguments and its result; None by default. has_scratch: whether to count the memory that CPU operators allocate internally.
    An operation whose result depends on values raises torch's DataDependentOutputException or a similar exception.
    """

    _results: ClassVar[dict[Hashable, "_CachedResult"]] = {}

    def __init__(self, ledger: Ledger, *, has_scratch: bool = True) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.ledger = ledger
        self.listener: Callable[[Hashable | None, Any, Any, Any, Any], None] | None = None
        self.has_scratch = has_scratch
        self._depth = 0
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, since `dispatch`, instead of `__torch_dispatch__`, is excluded from compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # called more often than all other operators
            return args[0].fake_device
        with torch._C.DisableTorchFunction():  # keeps torch-function modes out of queries of sizes
            return self.dispatch(func, types, args, kwargs)

    def make_fake(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """Returns `FakeTensor(self, elem, device)` faster, and does not count its memory. elem: a tensor on meta."""
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self, elem, device)))
        fake: FakeTensor = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes[device])
        return fake

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation without values, or replays its cached result. Counts its memory, and calls the listener."""
        kwargs = kwargs or {}
        if func in _SET_STORAGE_OPS:  # torch's own cache would keep the storage alive in its key
            with in_kernel_invocation_manager(self):
                func(*args, **kwargs)
            self._track_results(args[0])
            return args[0]
        key = _call_key(func, args, kwargs) if not self._depth else None
        cached = self._results.get(key) if key is not None else None
        if cached is not None:
            inputs, scratch = _fake_tensors(args, kwargs), cached.scratch
            results = [self._replay_result(recipe, inputs) for recipe in cached.recipes]
            result = cached.container(results) if cached.container is not None else results[0]
        else:
            result = self._run_in_torch(func, types, args, kwargs)
            if self._depth:
                return result
            self._track_results(result)
            scratch = scratch_bytes(func, args, kwargs, result)
            if key is not None:
                self._store_result(key, args, kwargs, result, scratch)
        if self.has_scratch:
            self.ledger.record_scratch(scratch)
        if self.listener is not None:
            self.listener(key, func, args, kwargs, result)
        return result

    def _run_in_torch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Lets torch run an operation. Returns None for one without results that torch cannot run on fake tensors."""
        self._depth += 1
        try:
            return super().dispatch(func, types, args, kwargs)
        except UnsupportedOperatorException:
            if func._schema.returns:
                raise
        finally:
            self._depth -= 1

    def _store_result(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any], result: Any, scratch: int) -> None:
        inputs = _fake_tensors(args, kwargs)
        container = type(result) if isinstance(result, tuple | list) else None
        items = result if container else [result]
        try:
            recipes = [_make_recipe(item, inputs) for item in items]
        except _UncacheableError:
            return
        pairs = zip(items, recipes, strict=True)
        new_storages = [storage_id(item) for item, recipe in pairs if recipe is not None and recipe[0] == "new"]
        if container in (None, tuple, list) and len(set(new_storages)) == len(new_storages):
            self._results[key] = _CachedResult(container, recipes, scratch)

    def _replay_result(self, recipe: Any, inputs: Sequence[FakeTensor]) -> Any:
        if recipe is None:
            return None
        recipe_type, source, size, stride, dtype, device = recipe
        if recipe_type == "same":
            return inputs[source]
        is_new = recipe_type == "new"
        elem = torch.empty_strided(size if is_new else (0,), stride if is_new else (1,), dtype=dtype, device="meta")
        if not is_new:
            index, offset = source
            elem.set_(inputs[index].untyped_storage(), offset, size, stride)
        fake = self.make_fake(elem, device)
        if is_new:
            self.ledger.track(fake)
        return fake

    def _track_results(self, result: Any) -> None:
        if isinstance(result, FakeTensor):
            self.ledger.track(result)
        elif isinstance(result, tuple | list):
            for item in result:
                self._track_results(item)

    def allocate_uncounted(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a new fake tensor of shape [numel], whose memory the ledger never counts."""
        with self:
            fake: Any = super().dispatch(_aten.empty.memory_format, (), ([numel],), {"dtype": dtype})
        self.ledger.ignore(fake)
        result: Tensor = fake
        return result

    @contextmanager
    def patch_torch(self) -> Iterator[None]:
        """Patches torch within the block, so that the ledger notices resized storages and weak references to storages, and
        `data_ptr` returns an address for fake tensors.
        """
        storage_type, ledger = torch.UntypedStorage, self.ledger
        resize, address, weak_ref = storage_type.resize_, storage_type.data_ptr, storage_type._weak_ref

        def resize_storage(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            ledger.update_size(storage)
            return result

        def weak_reference(storage: torch.UntypedStorage) -> Any:
            if storage.device.type == "meta":
                ledger.poll(storage)
            return weak_ref(storage)

        def storage_address(storage: torch.UntypedStorage) -> int:
            return ledger.address(storage) if storage.device.type == "meta" else address(storage)

        def tensor_address(tensor: FakeTensor) -> int:
            start = ledger.address(tensor.untyped_storage())
            return start + int(tensor.storage_offset()) * tensor.element_size() if start else 0

        changes = {
            (torch.UntypedStorage, "resize_"): resize_storage,
            (torch.UntypedStorage, "data_ptr"): storage_address,
            (torch.UntypedStorage, "_weak_ref"): weak_reference,
            (FakeTensor, "data_ptr"): tensor_address,
        }
        with ExitStack() as stack:
            stack.callback(PLAIN.discard, FakeTensor)
            PLAIN.add(FakeTensor)
            for (owner, name), replacement in changes.items():
                stack.enter_context(patch.object(owner, name, replacement))
            yield

    def keep_values(self, value: Tensor, *, counts: bool = False) -> Tensor:
        """Returns a fake tensor that keeps the values of `value`. Results that are computed on the CPU from such tensors alone
        keep their values too, up to `MAX_CONSTANT_NUMEL` elements. counts: whether the ledger counts the memory of `value`.
        """
        fake = self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)
        if counts:
            self.ledger.track(fake)
        else:
            self.ledger.ignore(fake)
        return fake

    def may_turn_const(self, t: Tensor) -> bool:
        """Returns whether a result `t` keeps its values. torch itself keeps those of single elements only."""
        return t.numel() <= MAX_CONSTANT_NUMEL and not self.is_our_fake(t) and t.device.type == "cpu" and not t.is_sparse


class _UncacheableError(Exception):
    """Raised for a call that cannot be cached."""


class _CachedResult(NamedTuple):
    """The cached result of a call. container: None for a single value. scratch: the internal scratch bytes."""

    container: type | None
    recipes: Sequence[Any]
    scratch: int


def _call_key(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
    """Returns the key of a call, or None for a call that is never cached."""
    name = _operator_name(func)
    if name is None:
        return None
    try:
        named = tuple((key, _argument_key(value)) for key, value in kwargs.items()) if kwargs else ()
        return name, tuple(map(_argument_key, args)), named
    except _UncacheableError:
        return None


@cache
def _operator_name(func: Any) -> str | None:
    is_uncached = func in _UNCACHED_OPS or torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags
    return None if is_uncached else func.name()


def _argument_key(value: Any) -> Hashable:
    """Returns the key of one argument. Raises _UncacheableError for an object that is not plain, or a tensor with values."""
    value_type = type(value)
    if value_type is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _UncacheableError
        is_lazy = value.is_conj() or value.is_neg()
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, is_lazy
    if value_type is list or value_type is tuple:
        return value_type, tuple(map(_argument_key, value))
    if value_type in _PLAIN_TYPES:
        return value_type, value
    raise _UncacheableError


def _fake_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[FakeTensor]:
    """Returns the fake tensors among the arguments of a call in order, including those in lists and tuples."""
    tensors: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, FakeTensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [item for item in value if isinstance(item, FakeTensor)]
    return tensors


def _make_recipe(result: Any, inputs: Sequence[FakeTensor]) -> Any:
    """Returns how to make `result` again, with the type "same", "view" (of an argument) or "new"; None for None."""
    if result is None:
        return None
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        raise _UncacheableError
    if result.is_conj() or result.is_neg() or result.requires_grad:
        raise _UncacheableError
    for index, tensor in enumerate(inputs):
        if result is tensor:
            return "same", index, None, None, None, None
    storage = storage_id(result)
    size, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.fake_device
    for index, tensor in enumerate(inputs):
        if storage_id(tensor) == storage:
            return "view", (index, result.storage_offset()), size, stride, dtype, device
    minimal_bytes = torch.empty_strided(size, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
    if result.storage_offset() or result.untyped_storage().nbytes() != minimal_bytes:
        raise _UncacheableError
    return "new", None, size, stride, dtype, device
