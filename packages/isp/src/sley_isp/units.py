"""A unit: sharded weights that are gathered together into one buffer, and where each of them lies in it.

flat buffer   | query.weight, whole | key.weight, whole | query.bias, whole | ...       aligned, padding rows included
                own rows copied, the others' received straight into their places
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from sley_core.api.parts import ALIGNMENT_BYTES, offsets

if TYPE_CHECKING:
    from sley_core.api.comm import Published, Transport
    from sley_core.api.model import Layer
    from sley_core.api.parts import Entry, ParameterBook
    from sley_core.api.weights import Shard
    from sley_core.protocols import MemoryPool


def sharded_modules(
    layer: Layer, book: ParameterBook, known: Iterable[nn.Module]
) -> Iterator[tuple[str, nn.Module, dict[str, Entry]]]:
    """The modules of `layer` that hold shards themselves and are not `known`: their names, and the entries by attribute."""
    others = {id(module) for module in known}
    for name, module in layer.module.named_modules(prefix=layer.name):
        if id(module) in others:
            continue
        places = {
            attribute: book[f"{name}.{attribute}"] for attribute, one in module._parameters.items() if one is not None
        }
        held = {attribute: entry for attribute, entry in places.items() if entry.shard is not None}
        if held:
            yield name, module, held


def shard_of(entry: Entry) -> Shard:
    """The shard of an entry that is cut by rows."""
    assert entry.shard is not None, f"{entry.name} is not sharded"
    assert entry.shard.dim == 0, f"{entry.name} is cut along dim {entry.shard.dim}"
    return entry.shard


def padded(entry: Entry) -> tuple[int, ...]:
    """The shape of the whole parameter, padding rows included."""
    shard = shard_of(entry)
    return (shard.count * shard.size, *shard.shape[1:])


@dataclass(eq=False)
class Unit:
    """The sharded entries of layer `layer`, or of one of its modules; each once, however many modules hold it."""

    name: str
    layer: str
    entries: list[Entry] = field(default_factory=list)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The shards, the same objects for the whole run."""
        return [entry.parameter for entry in self.entries]

    @property
    def shards(self) -> list[Tensor]:
        """Their values, outside of autograd."""
        return [parameter.detach() for parameter in self.parameters]

    @property
    def stamp(self) -> int:
        """Changes whenever somebody writes one of the shards."""
        return sum(parameter._version for parameter in self.parameters)

    def __repr__(self) -> str:
        return f"Unit({self.name})"


class Gathered:
    """The whole weights of `unit`, on their way until `wait`. The buffer is leased from `pool` until `release`.

    source: gathers them, over `size` ranks. num_bytes: of the buffer. num_received_bytes: of those, what comes from others.
    The shards stay as they are until `wait_sent`.
    """

    def __init__(self, unit: Unit, pool: MemoryPool, source: Transport | Published, size: int) -> None:
        parameters = unit.shards
        dtype, device = parameters[0].dtype, parameters[0].device
        starts, numel = layout(unit.entries, dtype.itemsize)
        self._versions = {entry: (one, one._version) for entry, one in zip(unit.entries, unit.parameters, strict=True)}
        self.num_received_bytes = sum(parameter.nbytes for parameter in parameters) * (size - 1)
        with ExitStack() as stack:
            flat = stack.enter_context(pool.lease((numel,), dtype, device))
            views = views_of(flat, unit.entries, starts)
            self.num_bytes = flat.nbytes
            # The unit's own order of entries, the same on all ranks of `wp`, which gather the same units in one order.
            self._work = source.all_gather(views, parameters, what=f"the weights of {unit.name}")
            self._stack = stack.pop_all()  # not if the exchange could not start
        self._wholes = {entry: view[: entry.shape[0]] for entry, view in zip(unit.entries, views, strict=True)}

    def is_older(self, entries: Iterable[Entry]) -> bool:
        """Whether somebody has written the shard of one of `entries` since; takes no time for the unit's others."""
        for entry in entries:
            parameter, version = self._versions[entry]
            if parameter._version != version:
                return True
        return False

    def wait(self) -> None:
        """Returns when the weights are there."""
        self._work.wait()

    def whole(self, entry: Entry) -> Tensor:
        """The whole parameter, without padding; valid until `release`."""
        return self._wholes[entry]

    def release(self) -> None:
        """Gives the buffer back, once nothing comes into it any more."""
        self._work.release()
        self._stack.close()
        self._wholes = {}

    def wait_sent(self) -> None:
        """Returns when every other rank has this one's shards."""
        self._work.wait_sent()


def layout(entries: Sequence[Entry], itemsize: int) -> tuple[list[int], int]:
    """Where the padded whole of each entry starts in a flat buffer, and how many elements that has."""
    return offsets([padded(entry) for entry in entries], ALIGNMENT_BYTES // itemsize)


def views_of(flat: Tensor, entries: Sequence[Entry], starts: Sequence[int]) -> list[Tensor]:
    """The padded whole of each entry, as a view of `flat`."""
    return [
        flat[start : start + prod(padded(entry))].view(padded(entry))
        for entry, start in zip(entries, starts, strict=True)
    ]
