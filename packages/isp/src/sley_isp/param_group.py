"""A parameter group: sharded weights that are all-gathered together into one flat buffer, like FSDP2's `FSDPParamGroup`.

flat buffer   | query.weight, full  | key.weight, full  | query.bias, full  | ...       aligned, padding rows included
                local rows are copied, peers' rows are received directly into their positions
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from sley_core.api.parts import ALIGNMENT_BYTES, FlatLayout

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Published, Transport
    from sley_core.api.parts import Param
    from sley_core.protocols import MemoryPool


def padded_shape(param: Param) -> tuple[int, ...]:
    """Returns the shape of the full parameter, including padding rows."""
    shard = param.row_shard
    return (shard.count * shard.size, *shard.shape[1:])


def remove_padding(full: Tensor, param: Param) -> Tensor:
    """Returns `full`, of shape `padded_shape(param)`, without its padding rows, as a view."""
    return full if len(full) == param.shape[0] else full[: param.shape[0]]


@dataclass(eq=False)
class ParamGroup:
    """The sharded parameters of a layer or of one of its modules. Includes tied parameters only once.

    layer: the layer's name. has_linear: whether a linear uses the parameters. The backward of a linear needs its weights,
    unlike that of an embedding.
    """

    name: str
    layer: str
    params: list[Param] = field(default_factory=list)
    has_linear: bool = False

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The shards, which are the same objects throughout the run."""
        return [param.parameter for param in self.params]

    @cached_property
    def layout(self) -> FlatLayout:
        """The layout of the full parameters, with padding rows, in a flat buffer."""
        shapes = [padded_shape(param) for param in self.params]
        return FlatLayout(shapes, ALIGNMENT_BYTES // self.parameters[0].dtype.itemsize)

    @property
    def version(self) -> int:
        """A number that changes with every write to a shard."""
        return sum(parameter._version for parameter in self.parameters)

    def __repr__(self) -> str:
        return f"ParamGroup({self.name})"


class UnshardedGroup:
    """Holds the full weights of `group` in a buffer that is leased from `pool` until `reshard`. They are complete after `wait`.

    source: the transport or published shards that gather the weights. size: the number of ranks. num_bytes: the size of the
    buffer. num_received_bytes: the size of the shards from peers. Local shards must not be written before `wait_sent` returns.
    """

    def __init__(self, group: ParamGroup, pool: MemoryPool, source: Transport | Published, size: int) -> None:
        shards = [parameter.detach() for parameter in group.parameters]
        self._versions = {param: parameter._version for param, parameter in zip(group.params, group.parameters, strict=True)}
        self.num_received_bytes = sum(shard.nbytes for shard in shards) * (size - 1)
        with ExitStack() as lease:
            self.buffer = lease.enter_context(pool.lease((group.layout.numel,), shards[0].dtype, shards[0].device))
            views = group.layout.views(self.buffer)
            self.num_bytes = self.buffer.nbytes
            # Over `wp`, whose ranks gather the same groups in the same order, with their parameters in the same order.
            self._work = source.all_gather(views, shards, label=f"the weights of {group.name}")
            self._lease = lease.pop_all()  # not reached if the all-gather could not start
        self._full_tensors = {param: remove_padding(view, param) for param, view in zip(group.params, views, strict=True)}

    def is_stale(self, params: Iterable[Param]) -> bool:
        """Returns whether the shard of one of `params` has changed since the all-gather started."""
        return any(param.parameter._version != self._versions[param] for param in params)

    def wait(self) -> None:
        """Blocks until the full weights are in the buffer."""
        self._work.wait()

    def full_tensor(self, param: Param) -> Tensor:
        """Returns the full parameter without padding, which is valid from `wait` until `reshard`."""
        return self._full_tensors[param]

    def position(self, tensor: Tensor) -> int | None:
        """Returns the offset of `tensor` in the buffer, in elements of its dtype, or None if it is elsewhere."""
        if tensor.untyped_storage()._cdata != self.buffer.untyped_storage()._cdata:
            return None
        start = self.buffer.storage_offset() * self.buffer.element_size()
        offset = tensor.storage_offset() * tensor.element_size() - start
        return offset // tensor.element_size() if 0 <= offset < self.num_bytes else None

    def reshard(self) -> None:
        """Returns the buffer to the pool, after waiting for the receives into it."""
        self._work.release()
        self._lease.close()
        self._full_tensors = {}

    def wait_sent(self) -> None:
        """Blocks until every peer has received this rank's shards, so that they may be written."""
        self._work.wait_sent()


class PublishedShards:
    """Publishes shards, which peers may then read during a step without a message for each all-gather.

    is_due: returns whether a layer's weights are still being computed. resharded_groups: resharded groups whose shards peers
    may still be receiving from this rank.
    """

    def __init__(self, group: Group, is_due: Callable[[str], bool]) -> None:
        self.resharded_groups: list[UnshardedGroup] = []
        self._group = group
        self._is_due = is_due
        self._published: Published | None = None
        self._versions: dict[ParamGroup, int] = {}

    def publish(self, groups: Sequence[ParamGroup]) -> None:
        """Publishes the shards of all `groups` that are not still being computed. The others are sent in each all-gather."""
        self._versions = {group: group.version for group in groups if not self._is_due(group.layer)}
        if self._versions:
            due_names = ", ".join(group.name for group in groups if group not in self._versions)
            shards = [parameter.detach() for group in self._versions for parameter in group.parameters]
            # A collective over `wp`, before the first gather of a step or an evaluation, which all its ranks begin together.
            label = f"the weights except {due_names}" if due_names else "the weights"
            self._published = self._group.transport("gather").publish(shards, label=label)

    def source(self, group: ParamGroup) -> Transport | Published:
        """Returns the published shards if those of `group` are unchanged, or the transport; the same on all ranks of `wp`."""
        if self._published is not None and self._versions.get(group) == group.version:
            return self._published
        return self._group.transport("gather")

    def finish(self) -> None:
        """Blocks until all peers have received this rank's shards, so that they may be written."""
        for unsharded in self.resharded_groups:
            unsharded.wait_sent()
        self.resharded_groups.clear()
        if self._published is not None:
            self._published.wait_sent()
            self._published = None

    def discard(self) -> None:
        """Drops the shards that a failed step has published, which would keep a communicator's threads alive."""
        self._published = None
