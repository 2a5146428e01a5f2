"""A placeholder that a module holds for a sharded weight: it has the shape of the full weight, without its values.

    module.weight ──> StandIn   shape, size, numel, len: of the full weight;  dtype, device: of the shard
                         │      values: refused with the parameter's name, whenever code reads them
                         └────> shard   what the book, the optimizer and the communicator work with

It costs nothing until code uses it, in whichever forward that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.engine.book import Entry

T: Any = Tensor

FACE = {
    *(T.shape.__get__, T.ndim.__get__, T.layout.__get__, T.nbytes.__get__, T.itemsize.__get__, T.is_sparse.__get__),
    *(T.size, T.numel, T.nelement, T.dim, T.ndimension, T.__len__, T.stride, T.is_contiguous, T.element_size),
    torch.numel,
}
"""Functions that depend on a tensor's shape and dtype only; they are answered for the full weight."""

OF_SHARD = {
    *(T.dtype.__get__, T.device.__get__, T.requires_grad.__get__, T.requires_grad.__set__, T.requires_grad_),
    *(T.is_leaf.__get__, T.grad_fn.__get__, T.is_cuda.__get__, T.is_cpu.__get__, T.is_meta.__get__, T.get_device),
    *(T.is_floating_point, T.is_complex, T.is_signed, torch.is_floating_point, torch.is_complex, torch.is_signed),
    *(torch.get_device, T.is_inference, torch.is_inference, T.is_quantized.__get__, T._version.__get__),
}
"""Functions whose result is the same for shard and full weight, or that set whether it is trained; called on the shard."""

LIKE = {
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
    *(T.new_empty, T.new_zeros, T.new_ones, T.new_full),
}
"""Functions that make another tensor of the first one's shape, type or device."""

AS_SECOND = {T.to, T.type_as, T.expand_as, T.view_as, T.reshape_as}
"""Functions that use only the shape, dtype or device of tensors other than the first."""


GRADIENT = {T.grad.__get__, T.grad.__set__}
"""The accessors of `grad`. A shard has no gradient of its own: gradients are in the store."""


class StandIn(nn.Parameter):
    """Stands for a parameter of the full shape of `entry`, of which this rank holds `shard`; has no memory of its own.

    Raises RunError `sharded-weight-read`, with the name, for any operation that needs values, in training and evaluation; after
    the run, RunError `weights-sharded`.
    """

    entry: Entry
    shard: nn.Parameter
    is_closed: bool
    """Whether the run is over, so that the full weight is no longer gathered."""

    @staticmethod
    def __new__(cls, entry: Entry) -> StandIn:
        shard = entry.parameter
        made: StandIn = Tensor._make_wrapper_subclass(
            cls, entry.shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        made.entry = entry
        made.shard = shard
        made.is_closed = False
        return made

    def __init__(self, entry: Entry) -> None:
        del entry

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"StandIn({self.entry.name}, {list(self.entry.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        raise self._refused("deepcopy")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise self._refused("pickle")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers functions of shape for the full weight, those of dtype and device for the shard; refuses all that need
        values.
        """
        kwargs = kwargs or {}
        if function in OF_SHARD:
            return function(*(one.shard if isinstance(one, StandIn) else one for one in args), **kwargs)
        if function in FACE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        first = next(_stand_ins((args, kwargs)))
        if function in GRADIENT and first.shard.grad is None and args[1:] in ((), (None,)):
            return None
        free, bound = (args[:1], args[1:]) if function in LIKE else (args[1:], args[:1])
        if function in LIKE | AS_SECOND and not any(_stand_ins((bound, kwargs))):
            replaced = [_shape_of(one) for one in free]
            return function(*replaced, *bound, **kwargs) if function in LIKE else function(*bound, *replaced, **kwargs)
        raise first._refused(_name(function))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's
        """Refuses any operation that got past `__torch_function__`."""
        raise next(_stand_ins((args, kwargs or {})))._refused(str(function))

    def _refused(self, what: str) -> Exception:
        return (_read_closed if self.is_closed else sharded_read)(self.entry, f"`{what}` reads")


def stand_in(entries: Iterable[Entry]) -> None:
    """Replaces the sharded parameters of `entries` by stand-ins in their modules; `Entry.parameter` still finds the shard."""
    for entry in entries:
        if entry.shard is not None:
            made = StandIn(entry)
            for holder in entry.holders:
                holder.module._parameters[holder.attribute] = made


def close_stand_ins(entries: Iterable[Entry]) -> None:
    """Marks the stand-ins of `entries` as closed: their errors say that the run is over. Modules keep them."""
    for entry in entries:
        held = entry.holders[0].module._parameters.get(entry.holders[0].attribute)
        if isinstance(held, StandIn):
            held.is_closed = True


def _shape_of(value: Any) -> Any:
    """Returns a tensor of the full shape, dtype and device of a stand-in, backed by one element; any other value unchanged."""
    if not isinstance(value, StandIn):
        return value
    shard = value.shard
    return torch.empty((), dtype=shard.dtype, device=shard.device).expand(value.entry.shape)


def _name(function: Any) -> str:
    """Returns the function's name as a user writes it; for an attribute's getter, the attribute's name."""
    name: str = getattr(function, "__name__", str(function))
    return getattr(function.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def _stand_ins(value: Any) -> Iterator[StandIn]:
    """Yields the stand-ins in `value` and in the lists, tuples and dicts within it."""
    if isinstance(value, StandIn):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _stand_ins(one)


def sharded_read(entry: Entry, what: str) -> RunError:
    """Returns the error `sharded-weight-read`: `what` reads the values of `entry`, of which no rank has all."""
    return RunError(
        "sharded-weight-read",
        f"{what} the parameter {entry.name!r}, of which this rank holds {_part(entry)}, without its module",
        hint="call the linear or embedding that holds it; a module that reads its own parameters is not sharded. Between "
        "steps, `sley_core.engine.shards.wholes` gives copies of whole weights, and `run.book[name].parameter` is the shard",
    )


def _read_closed(entry: Entry, what: str) -> RunError:
    return RunError(
        "weights-sharded",
        f"{what} the parameter {entry.name!r} after its run was closed, and this rank holds {_part(entry)}",
        hint="call the model while the run is open, or take whole weights out before",
    )


def _part(entry: Entry) -> str:
    assert entry.shard is not None, f"{entry.name} is whole"
    return f"{entry.shard.own_size} of {entry.shape[entry.shard.dim]} {'columns' if entry.shard.dim else 'rows'}"
