"""A parameter group: sharded weights that are all-gathered together into one flat buffer, like FSDP2's `FSDPParamGroup`.

flat buffer   | query.weight, full  | key.weight, full  | query.bias, full  | ...       aligned, padding rows included
                local rows are copied, peers' rows are received directly into their positions

With `gather_precision = "fp8"`, ranks send shards as e4m3 numbers, in blocks of 128 elements:

    shard  ──>  row of bytes  | codes, one byte per element | fp32 scales, one per block |

A scale is a power of two, so the only error comes from rounding to e4m3, which has 3 bits of mantissa: at most 2^-4 of an
element. Elements below about 2^-14 times the largest element of their block become subnormal, with an error of at most about
2^-18 times the largest element. The smallest scale is 2^-126; with it, the error of a subnormal is at most 2^-136.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.api.comm import Group, Published, Transport
from sley_core.api.memory import DevicePool
from sley_core.api.parts import ALIGNMENT_BYTES, FlatLayout, Param
from sley_isp.plugin import CommunicatorConfig

BLOCK = 128
"""The number of elements that share a scale."""

SCALE_BYTES = 4
"""The size of a scale, an fp32 number, in bytes."""

MAX_CODE = 448.0
"""The largest finite e4m3 number."""


def encode(shard: Tensor) -> Tensor:
    """Returns the e4m3 codes and then the scales of `shard`, uint8 [132 x blocks]. A block with NaN or infinity becomes NaN."""
    blocks = F.pad(shard.reshape(-1).float(), (0, -shard.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    mantissas, exponents = torch.frexp(largest)
    # The exponent of the smallest power of two whose product with 448 = 0.875 * 2^9 is at least the largest element.
    exponents = (exponents - 9 + (mantissas > MAX_CODE / 2**9).int()).clamp(-126, 127)
    scales = torch.ldexp(torch.ones_like(largest), exponents) + (largest - largest)  # NaN unless all elements are finite
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8).view(-1), scales.view(torch.uint8).view(-1)])


def decode(rows: Tensor, full: Tensor) -> None:
    """Decodes `rows`, uint8 [size, 132 x blocks], the shards of all ranks, into `full` [size x n, ...], which is contiguous."""
    if not full.numel():
        return
    size, num_blocks = len(rows), rows.shape[1] // (BLOCK + SCALE_BYTES)
    codes = rows[:, : num_blocks * BLOCK].view(torch.float8_e4m3fn).float().reshape(size, num_blocks, BLOCK)
    scales = rows[:, num_blocks * BLOCK :].view(torch.float32).unsqueeze(-1)
    full.view(size, -1).copy_((codes * scales).view(size, -1)[:, : full.numel() // size])


def padded_shape(param: Param) -> tuple[int, ...]:
    """Returns the shape of the full parameter, including padding rows."""
    shard = param.row_shard
    return (shard.count * shard.size, *shard.shape[1:])


def remove_padding(full: Tensor, param: Param) -> Tensor:
    """Returns `full`, of shape `padded_shape(param)`, without its padding rows, as a view."""
    return full if len(full) == param.shape[0] else full[: param.shape[0]]


@dataclass(eq=False, repr=False)
class ParamGroup:
    """The sharded parameters of a layer or of one of its modules. Includes tied parameters only once.

    layer: the layer's name. options: the keys of [weights] for this group. pool: the pool for full parameters and gradients.
    can_prefetch: whether any use may start prefetches, and not only a module that `launch` names. has_linear: whether a
    backward needs the weights; the backward of an embedding does not.
    """

    name: str
    layer: str
    options: CommunicatorConfig
    pool: DevicePool
    params: list[Param] = field(default_factory=list)
    can_prefetch: bool = True
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
        """A number that changes with every in-place write to a shard that autograd counts."""
        return sum(parameter._version for parameter in self.parameters)

    def shards_to_send(self) -> list[Tensor]:
        """Returns the tensors that this rank sends, one per parameter, all contiguous: shards, or the results of `encode`."""
        prepare = encode if self.options.gather_precision == "fp8" else Tensor.contiguous
        return [prepare(shard.detach()) for shard in self.parameters]


class UnshardedGroup:
    """Holds the full weights of `group` in a buffer that is leased until `reshard`. The constructor starts to gather the
    weights, which are complete after `wait`. Local shards must not be written before `wait_sent` returns. source: gathers the
    shards. shards: the result of `ParamGroup.shards_to_send`. size: the number of ranks. full_tensors: the full parameters
    without padding, valid from `wait` until `reshard`.
    """

    def __init__(self, group: ParamGroup, source: Transport | Published, shards: Sequence[Tensor], size: int) -> None:
        self.version = group.version
        self._shards = shards  # peers read them until `wait_sent`
        self.num_received_bytes = sum(shard.nbytes for shard in shards) * (size - 1)
        dtype, device = group.parameters[0].dtype, shards[0].device
        with ExitStack() as lease, ExitStack() as received_lease:
            self.buffer = lease.enter_context(group.pool.lease((group.layout.numel,), dtype, device))
            views = received = group.layout.views(self.buffer)
            if group.options.gather_precision == "fp8":
                layout = FlatLayout([(size * len(shard),) for shard in shards], ALIGNMENT_BYTES)
                received = layout.views(received_lease.enter_context(group.pool.lease((layout.numel,), torch.uint8, device)))
            # This is a collective over `wp`. Its ranks gather the same groups and parameters in the same order.
            self._work = source.all_gather(received, shards, label=f"the weights of {group.name}")
            # If an exception is raised before this line, the `with` block returns the buffers to the pool.
            self._lease, self._received_lease = lease.pop_all(), received_lease.pop_all()
        self._encoded = [(rows.view(size, -1), view) for rows, view in zip(received, views, strict=True) if rows is not view]
        self.full_tensors = {param: remove_padding(view, param) for param, view in zip(group.params, views, strict=True)}

    def wait(self) -> None:
        """Blocks until the full weights are in the buffer."""
        self._work.wait()
        for rows, full in self._encoded:
            decode(rows, full)
        self._encoded = []
        self._received_lease.close()

    def offset_of(self, tensor: Tensor) -> int | None:
        """Returns the offset of `tensor` in the buffer, in elements of the tensor's dtype, or None if `tensor` is elsewhere."""
        if tensor.untyped_storage()._cdata != self.buffer.untyped_storage()._cdata:
            return None
        start = self.buffer.storage_offset() * self.buffer.element_size()
        offset = tensor.storage_offset() * tensor.element_size() - start
        return offset // tensor.element_size() if 0 <= offset < self.buffer.nbytes else None

    def reshard(self) -> None:
        """Waits for the receives into the buffer, and returns the buffer to the pool."""
        self._work.release()
        self._received_lease.close()
        self._lease.close()
        self.full_tensors, self._encoded = {}, []

    def wait_sent(self) -> None:
        """Blocks until every peer has received this rank's shards, so that this rank may write to the shards."""
        self._work.wait_sent()
        self._shards = ()


class PublishedShards:
    """Publishes shards, so that peers can read them during a step without a message from this rank for each all-gather. is_due:
    a function that takes a layer's name, and returns whether its weights are not current yet.
    """

    def __init__(self, group: Group, is_due: Callable[[str], bool]) -> None:
        self.resharded_groups: list[UnshardedGroup] = []
        self._group = group
        self._is_due = is_due
        self._published: Published | None = None
        self._shards: dict[ParamGroup, tuple[int, list[Tensor]]] = {}

    def publish(self, groups: Sequence[ParamGroup]) -> None:
        """Publishes the shards of all `groups` whose weights are current. All other shards are sent in each all-gather."""
        self._shards = {group: (group.version, group.shards_to_send()) for group in groups if not self._is_due(group.layer)}
        if self._shards:
            due_names = ", ".join(group.name for group in groups if group not in self._shards)
            shards = [shard for _, group_shards in self._shards.values() for shard in group_shards]
            # This is a collective over `wp`, whose ranks all begin a step or an evaluation together, before the first gather.
            label = f"the weights except {due_names}" if due_names else "the weights"
            self._published = self._group.transport("gather").publish(shards, label=label)

    def gather(self, group: ParamGroup, *, is_unchanged: bool) -> UnshardedGroup:
        """Starts the all-gather of `group`, and returns the object that will hold the full weights. Uses the published shards
        if the data are unchanged. is_unchanged: whether an equal version proves that. All ranks of `wp` must make the same
        choice.
        """
        version, shards = self._shards.get(group, (None, []))
        if is_unchanged and self._published is not None and version == group.version:
            return UnshardedGroup(group, self._published, shards, self._group.size)
        return UnshardedGroup(group, self._group.transport("gather"), group.shards_to_send(), self._group.size)

    def finish(self) -> None:
        """Blocks until all peers have received this rank's shards, so that this rank may write to the shards."""
        for unsharded in self.resharded_groups:
            unsharded.wait_sent()
        self.resharded_groups.clear()
        if self._published is not None:
            self._published.wait_sent()
        self.discard()

    def discard(self) -> None:
        """Drops the published shards. After a failed step, they would otherwise keep a communicator's threads alive."""
        self._published, self._shards = None, {}
