"""A parameter group: sharded weights that are all-gathered together into one flat buffer, as FSDP2's `FSDPParamGroup`.

flat buffer   | query.weight, full  | key.weight, full  | query.bias, full  | ...       aligned, padding rows included
                own rows copied, peers' rows received straight into their places
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from sley_core.api.parts import ALIGNMENT_BYTES, offsets, views_of

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Published, Transport
    from sley_core.api.parts import Param
    from sley_core.api.weights import Shard
    from sley_core.protocols import MemoryPool


def shard_of(param: Param) -> Shard:
    """Returns the shard of a parameter that is cut along dim 0; asserts that it is."""
    shard = param.shard
    assert shard is not None, f"{param.name} is not sharded"
    assert shard.dim == 0, f"{param.name} is cut along dim {shard.dim}"
    return shard


def padded_shape(param: Param) -> tuple[int, ...]:
    """Returns the shape of the full parameter, padding rows included."""
    shard = shard_of(param)
    return (shard.count * shard.size, *shard.shape[1:])


def without_padding(full: Tensor, param: Param) -> Tensor:
    """Returns the rows of `full`, of shape `padded_shape(param)`, that are the parameter's: a view, or `full` itself."""
    return full if len(full) == param.shape[0] else full[: param.shape[0]]


@dataclass(eq=False)
class ParamGroup:
    """The sharded parameters of layer `layer`, or of one of its modules; a tied parameter is there once.

    has_linear: whether a linear uses them, whose backward may need the weights; the backward of an embedding does not.
    """

    name: str
    layer: str
    params: list[Param] = field(default_factory=list)
    has_linear: bool = False

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The shards, the same objects for the whole run."""
        return [param.parameter for param in self.params]

    @cached_property
    def layout(self) -> tuple[list[tuple[int, ...]], list[int], int]:
        """The shapes and offsets of the full parameters in a flat buffer, padding included, and its size, in elements."""
        shapes = [padded_shape(param) for param in self.params]
        return shapes, *offsets(shapes, ALIGNMENT_BYTES // self.parameters[0].dtype.itemsize)

    @property
    def version(self) -> int:
        """A number that changes with every write to one of the shards."""
        return sum(parameter._version for parameter in self.parameters)

    def __repr__(self) -> str:
        return f"ParamGroup({self.name})"


class Unsharded:
    """The full weights of `group`, in flight until `wait`, in a buffer that is leased from `pool` until `reshard`.

    source: gathers them, over `size` ranks. num_bytes: of the buffer. num_received_bytes: the part that peers send. The shards
    must not be written until `wait_sent`.
    """

    def __init__(self, group: ParamGroup, pool: MemoryPool, source: Transport | Published, size: int) -> None:
        shards = [parameter.detach() for parameter in group.parameters]
        shapes, starts, numel = group.layout
        self._versions = {param: parameter._version for param, parameter in zip(group.params, group.parameters, strict=True)}
        self.num_received_bytes = sum(shard.nbytes for shard in shards) * (size - 1)
        with ExitStack() as lease:
            flat = lease.enter_context(pool.lease((numel,), shards[0].dtype, shards[0].device))
            views = views_of(flat, starts, shapes)
            self.num_bytes = flat.nbytes
            # Over `wp`, whose ranks gather the same groups in one order, each with its parameters in the group's order.
            self._work = source.all_gather(views, shards, what=f"the weights of {group.name}")
            self._lease = lease.pop_all()  # not if the all-gather could not start
        self._full = {param: without_padding(view, param) for param, view in zip(group.params, views, strict=True)}

    def is_stale(self, params: Iterable[Param]) -> bool:
        """Returns whether the shard of one of `params` was written since the all-gather started."""
        return any(param.parameter._version != self._versions[param] for param in params)

    def wait(self) -> None:
        """Blocks until the full weights are in the buffer."""
        self._work.wait()

    def full(self, param: Param) -> Tensor:
        """Returns the full parameter, without padding; valid from `wait` until `reshard`."""
        return self._full[param]

    def reshard(self) -> None:
        """Returns the buffer to the pool, once nothing is received into it any more."""
        self._work.release()
        self._lease.close()
        self._full = {}

    def wait_sent(self) -> None:
        """Blocks until every peer has this rank's shards; they may be written after that."""
        self._work.wait_sent()


class PublishedShards:
    """The shards that peers may read during a step without a message for each all-gather.

    is_due: returns whether something must still be waited for before a layer's weights are used. resharded: weights that are
    no longer used, while peers may still be receiving this rank's shards of them.
    """

    def __init__(self, group: Group, is_due: Callable[[str], bool]) -> None:
        self.resharded: list[Unsharded] = []
        self._group = group
        self._is_due = is_due
        self._published: Published | None = None
        self._versions: dict[ParamGroup, int] = {}

    def begin(self, groups: Sequence[ParamGroup]) -> None:
        """Publishes the shards without a pending wait; the others are sent in each all-gather."""
        self._versions = {group: group.version for group in groups if not self._is_due(group.layer)}
        if self._versions:
            due = ", ".join(group.name for group in groups if group not in self._versions)
            shards = [parameter.detach() for group in self._versions for parameter in group.parameters]
            # A collective over `wp`, before the first gather of a step or an evaluation, which all its ranks begin together.
            what = f"the weights but for {due}" if due else "the weights"
            self._published = self._group.transport("gather").publish(shards, what=what)

    def source(self, group: ParamGroup) -> Transport | Published:
        """Returns the published shards if they are unchanged, else the transport; the same on all ranks of `wp`."""
        if self._published is not None and self._versions.get(group) == group.version:
            return self._published
        return self._group.transport("gather")

    def end(self) -> None:
        """Waits until all peers have this rank's shards, which may change from now on."""
        for unsharded in self.resharded:
            unsharded.wait_sent()
        self.resharded.clear()
        if self._published is not None:
            self._published.wait_sent()
            self._published = None

    def discard(self) -> None:
        """Drops the shards that a failed step has published: they would keep a communicator whose threads must end."""
        self._published = None
