"""Refuses tensors that share a parameter's memory other than as a tie: training would separate them without an error.

A parameter's values are created anew on the rank that owns it, in new memory. One `nn.Parameter` in several modules stays one.
But a view of it, or one held by a list or a function, would keep its old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sley_core.errors import PlanError
from sley_core.model.journal import META, Journal
from sley_core.model.layers import MODEL, Layer, Leftover
from sley_core.model.reach import HeldTensor, held_tensors
from sley_core.model.steps import Cell, Ref, is_blank


class Registered(NamedTuple):
    """Names a parameter or buffer of a module, as a view of its memory; a tie by the first of its names."""

    name: str
    tensor: Tensor
    ref: Ref

    @property
    def is_trained(self) -> bool:
        """Whether it is a parameter that requires a gradient."""
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad


class RegisteredMemory:
    """Finds which parameters and buffers lie in which cell."""

    def __init__(self, registered: Iterable[Registered]) -> None:
        self.by_id = {id(one.tensor): one for one in reversed(list(registered))}
        self.by_cell: dict[Cell, list[Registered]] = {}
        for one in reversed(list(self.by_id.values())):
            self.by_cell.setdefault(one.ref.cell, []).append(one)

    def check(self) -> None:
        """Raises PlanError "model-init" for two tensors that share memory, one of them a parameter that is trained."""
        for together in self.by_cell.values():
            ahead = sorted(together, key=lambda one: _span(one.ref))
            for at, one in enumerate(ahead):
                end = _span(one.ref)[1]
                for other in takewhile(lambda other: _span(other.ref)[0] < end, ahead[at + 1 :]):  # noqa: B023  # used at once
                    if (one.is_trained or other.is_trained) and overlap(one.ref, other.ref):
                        raise _shared(*sorted((one, other), key=together.index))

    def shared_with(self, ref: Ref) -> Registered | None:
        """Returns the trained parameter of which `ref` is a view or part, or None."""
        known = self.by_cell.get(ref.cell, ())
        return next((one for one in known if one.is_trained and overlap(one.ref, ref)), None)


def overlap(one: Ref, other: Ref) -> bool:
    """Returns whether two views of one cell have a byte in common; interleaved columns of one matrix do not."""
    spans = [_span(ref) for ref in (one, other)]
    (first, end), (other_first, other_end) = spans
    if max(first, other_first) >= min(end, other_end):
        return False
    low = min(first, other_first)
    marks = torch.zeros(max(end, other_end) - low, dtype=torch.bool, device="cpu")
    views = [_bytes(marks, ref, at - low) for ref, (at, _) in zip((one, other), spans, strict=True)]
    views[0].fill_(True)
    return bool(views[1].any())


def check_held(
    layers: Sequence[Layer], memory: RegisteredMemory, journal: Journal, stand_in: Callable[[Tensor], Tensor | None]
) -> None:
    """Stores in `Layer.held` the other meta tensors that each layer holds, which get their values with the layer.

    stand_in: returns the meta parameter that replaces one that the factory made. Raises PlanError "model-init", with
    the attribute, for a held parameter, and for a tensor that shares memory with a trained one.
    """
    registered = {id(module) for layer in layers for module in layer.module.modules()}
    for layer in layers:
        found = _held(held_tensors(layer, registered), memory, journal, stand_in)
        layer.held = list({id(held.tensor): held for held in found}.values())


def _held(
    found: Iterable[HeldTensor], memory: RegisteredMemory, journal: Journal, stand_in: Callable[[Tensor], Tensor | None]
) -> Iterator[Leftover]:
    """Yields the held tensors to which a run must give values; raises PlanError for parameters and their views.

    A real tensor is brought up to date instead; a meta tensor that was never written is left alone.
    """
    for where, tensor, in_module in found:
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            continue
        known = memory.by_id.get(id(stand_in(tensor)), memory.by_id.get(id(tensor)))
        if known is not None and isinstance(known.tensor, nn.Parameter):
            if tensor is known.tensor and in_module:
                continue  # a module of no layer may hold it without using it in a forward
            raise _kept(where, known.name)
        ref = journal.ref(tensor)
        shared = memory.shared_with(ref)
        if shared is not None:
            raise _alias(where, shared.name)
        if not tensor.is_meta:
            journal.refresh(tensor)
        elif not (is_blank(ref) and journal.shown(tensor) == META):
            yield Leftover(where, tensor, None if tensor.grad_fn is not None else ref)


def _span(ref: Ref) -> tuple[int, int]:
    """Returns the offsets of the view's first byte and of the byte after its last."""
    item = ref.dtype.itemsize
    if not prod(ref.size):
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(ref.size, ref.stride, strict=True))
    return ref.offset * item, (ref.offset + last + 1) * item


def _bytes(marks: Tensor, ref: Ref, at: int) -> Tensor:
    item = ref.dtype.itemsize
    return marks.as_strided((*ref.size, item), (*(stride * item for stride in ref.stride), 1), at)


def _shared(one: Registered, other: Registered) -> PlanError:
    """Returns the error for two registered tensors that share memory."""
    kinds = ["parameter" if isinstance(each.tensor, nn.Parameter) else "buffer" for each in (one, other)]
    if kinds == ["parameter", "parameter"]:
        message = f"the parameters {one.name!r} and {other.name!r} share their memory, but are two parameters"
        hint = "tie them by giving both modules one and the same nn.Parameter, or `.clone()` one of them"
    else:
        message = f"the {kinds[0]} {one.name!r} and the {kinds[1]} {other.name!r} share their memory"
        hint = "`.clone()` the buffer, or compute it in the forward"
    return PlanError("model-init", message, path=MODEL, hint=hint)


def _kept(where: str, name: str) -> PlanError:
    """Returns the error for a parameter held by something other than a module."""
    message = (
        f"`{where}` holds the parameter {name!r}, but not as a module's parameter: a run would train another tensor"
    )
    hint = (
        "let the forward ask the module that holds it (`self.linear.weight`), or give it to this module as well: a tie"
    )
    return PlanError("model-init", message, path=MODEL, hint=hint)


def _alias(where: str, name: str) -> PlanError:
    message = f"`{where}` shares its memory with the parameter {name!r}, and would not follow its training"
    return PlanError("model-init", message, path=MODEL, hint="`.clone()` it, or compute it in the forward")
