"""Reduce-scatter of weight gradients, from full size to shards: buckets being filled, and a queue of those in flight.

lease ──> products written ──> sent and received ──> own rows summed ──> store.add ──> lease back
            `add`                in the background     `advance`, when all is here     `finish`, when the bound or
                                                                                       the end of a pass asks

Once per micro-batch a bucket leaves in the action that filled it. Once per step it stays, at full size, until the last
action that can add to it: fewer exchanges, for the memory of all full-size gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sley_core.api.comm import REDUCE, checksum
from sley_core.api.parts import ALIGNMENT_BYTES, offsets, views_of
from sley_isp.tokens import Together
from sley_isp.units import padded, shard_of, unpadded

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.comm import Group, SentBytes, Work
    from sley_core.api.parts import GradientStore, Param
    from sley_core.protocols import MemoryPool
    from sley_isp.sites import Site


@dataclass(eq=False)
class GradientBucket:
    """Names parameters whose gradients are reduced in one exchange.

    number: counts buckets in the order of their layers. name: of the layer or module. layer: the first one. sources: pairs of a
    place and the parameter to which its backward adds. chunks: those of all of its parameters, if it is reduced once per step.
    """

    number: int
    name: str
    layer: str
    chunks: frozenset[int]
    params: list[Param] = field(default_factory=list)
    sources: set[tuple[Hashable, Param]] = field(default_factory=set)


@dataclass(eq=False)
class Open:
    """Holds a bucket being filled. wholes: full gradients, padded. written: parameters whose memory holds a gradient
    already.
    """

    bucket: GradientBucket
    wholes: dict[Param, Tensor]
    lease: ExitStack
    written: set[Param] = field(default_factory=set)

    def is_complete(self, places: Container[Hashable]) -> bool:
        """Returns whether every place that adds to a trained parameter is among `places`, those of the current action so
        far.
        """
        return all(place in places for place, param in self.bucket.sources if param in self.wholes)


class GradientBuckets:
    """Assigns the parameters of sites to buckets.

    contribution ──> open, full size ──> contribution* ──> sent: each place that contributes has had its backward, and another
                                                            is next (or the action that may complete it ends)

    A place is a unit, or a module if each module has a bucket. The modules of a unit that have contributed do not show whether
    others will: that may depend on the data, which differ between ranks, and all ranks must send in one order.

    fused: one bucket per unit, else one per site. once: each parameter is in one bucket only, however many sites hold it,
    so that it can be reduced once; otherwise a tied weight's gradient is sent from each place where it is used.
    """

    def __init__(self, *, fused: bool, once: bool) -> None:
        self.fused = fused
        self.once = once
        self._parcels: dict[Hashable, GradientBucket] = {}
        self._homes: dict[Param, Site] = {}

    def add(self, site: Site) -> None:
        """Registers `site` as a contributor to all of its parameters; called for all sites before the first `of`."""
        for param in site.params:
            home = self._homes.setdefault(param, site) if self.once else site
            name = home.unit.name if self.fused else home.name
            bucket = self._parcels.setdefault(
                self._key(home, param), GradientBucket(len(self._parcels), name, home.unit.layer, param.chunks)
            )
            if param not in bucket.params:
                bucket.params.append(param)
            bucket.sources.add((self._place(site), param))

    def of(self, site: Site, param: Param) -> tuple[GradientBucket, Hashable]:
        """Returns the bucket of the gradient of `param` from `site`, and the part of a backward in which it comes.

        That is the backward of the site's unit, or of the site alone.
        """
        return self._parcels[self._key(self._homes[param] if self.once else site, param)], self._place(site)

    def _place(self, site: Site) -> Hashable:
        return site.unit if self.fused else site

    def _key(self, home: Site, param: Param) -> Hashable:
        return (self._place(home), param.chunks if self.once else None)


Write = Callable[[Tensor, bool], None]
"""Writes a gradient into a tensor of the store's dtype, or adds it if the flag is set."""


class _Reduction(NamedTuple):
    """Holds a bucket in flight. owned: this rank's rows of each full gradient, which hold the sum once `work` is done. If the
    order of sums is fixed: the rows of each rank; `came`: of which micro-batches, `layer`: from which layer.
    """

    work: Work
    owned: list[tuple[Param, Tensor]]
    lease: ExitStack
    came: range | None = None
    layer: str = ""


class Reductions:
    """Sums gradients over `group` and adds this rank's rows to `store`, with at most `bound` buckets in flight.

    bound: 0 waits for each at once. once: buckets wait for the last action of the step that can add to them; `bound`
    then holds for those that were sent. Since the beginning: num_started, num_bytes: exchanges and bytes sent;
    max_live: most full-size gradients at one time, those being written included; max_live_bytes: most bytes of all
    buffers leased for them, receive buffers included. sent: counts what is sent.
    """

    def __init__(
        self, bound: int, store: GradientStore, pool: MemoryPool, group: Group, sent: SentBytes, *, once: bool = False
    ) -> None:
        self.bound = bound
        self.once = once
        self.store = store
        self.pool = pool
        self.group = group
        self.sent = sent
        self.num_started = 0
        self.num_bytes = 0
        self.max_live = 0
        self.max_live_bytes = 0
        self._place: Hashable = None
        self._places: set[Hashable] = set()
        self._open: dict[GradientBucket, Open] = {}
        self._under_way: deque[_Reduction] = deque()
        self._live = 0
        self._live_bytes = 0

    def add(self, bucket: GradientBucket, place: Hashable, param: Param, write: Write) -> None:
        """Adds a contribution to the gradient of `param` in `bucket`; may start or finish earlier reductions.

        place: the unit or module whose backward this is part of. write: puts or adds the gradient into a full-size tensor. All
        ranks of `group` must go from place to place in the same order.
        """
        self.advance()
        if place is not self._place:
            # Compared by place, not by bucket: a weight tied to another layer's is in that layer's bucket, and how often
            # a place alternates between the two may depend on its data.
            self._places.add(self._place)
            self._place = place
            for before in self._in_order():
                if self._may_leave(before.bucket) and (before.is_complete(self._places) or not self.once):
                    self._start(before)
        filled = self._open.get(bucket) or self._opened(bucket)
        write(unpadded(filled.wholes[param], param), param in filled.written)
        filled.written.add(param)

    def flush(self, *, everything: bool = False) -> None:
        """Starts the reduction of every open bucket that may be sent; called at the end of an action.

        With `once`, those are the buckets to which no later action can add. everything: all buckets; used outside of a
        step, where no contribution is known to be the last.
        """
        for filled in self._in_order():
            if everything or self._may_leave(filled.bucket):
                self._start(filled)
        self._place = None
        self._places.clear()

    def advance(self) -> None:
        """Sums the reductions that have arrived, oldest first. Never blocks.

        So a faster peer need not wait for this rank. The result is added to the store only in `finish`, at the same point on
        all ranks, because the store may then start other collectives.
        """
        for reduction in self._under_way:
            if reduction.work.test():
                reduction.work.wait()

    def finish(self, left: int = 0) -> None:
        """Waits for the oldest reductions until at most `left` are in flight, and adds each result to the store."""
        while len(self._under_way) > left:
            reduction = self._under_way.popleft()
            reduction.work.wait()  # if this fails, a peer may still read the buffer, so it is not returned to the pool
            try:
                for param, rows in reduction.owned:
                    if reduction.came is None:
                        self.store.add(param, rows)
                    else:
                        by_micro = dict(zip(reduction.came, rows, strict=True))
                        self.store.add_of_micros(param, by_micro, reduction.layer)
            finally:
                self._end(reduction)

    def forget(self) -> None:
        """Waits for all reductions and discards the results, after a failed step."""
        for filled in self._open.values():
            filled.lease.close()
        self._open.clear()
        self._place = None
        self._places.clear()
        while self._under_way:
            self._end(self._under_way.popleft())
        self._live = 0

    def _in_order(self) -> list[Open]:
        """Returns the open buckets, those of later layers first: which was opened first may depend on the data."""
        return sorted(self._open.values(), key=lambda filled: -filled.bucket.number)

    def _may_leave(self, bucket: GradientBucket) -> bool:
        """Returns whether `bucket` may be sent: at once, or with `once` when no action of this list can add to it any more."""
        return not self.once or self.store.state.last_of_list(bucket.chunks)

    def _opened(self, bucket: GradientBucket) -> Open:
        """Leases full-size memory for a bucket; first waits for older ones if the bound asks for it. Contents are undefined."""
        if not self.once:
            self.finish(max(0, self.bound - 1))
        params = [param for param in bucket.params if param.trainable]
        lease = ExitStack()
        wholes = self._lent([padded(param) for param in params], lease)
        for param, whole in zip(params, wholes, strict=True):
            if len(whole) > param.shape[0]:  # else two operators for nothing, for each weight
                whole[param.shape[0] :].zero_()
        filled = self._open[bucket] = Open(bucket, dict(zip(params, wholes, strict=True)), lease)
        self._live += len(wholes)
        self.max_live = max(self.max_live, self._live)
        return filled

    def _start(self, filled: Open) -> None:
        """Starts the reduce-scatter of a bucket; all its parameters are sent on every rank, with zeros for those not
        written.
        """
        bucket = filled.bucket
        del self._open[bucket]
        if self.once:
            self.finish(max(0, self.bound - 1))
        wholes = filled.wholes
        for param in wholes.keys() - filled.written:
            wholes[param].zero_()  # another rank may have used it, in a forward that depends on its data
        came = self.store.reduction.micros_beside(self.group)
        self._under_way.append(self._reduced(filled) if came is None else self._swapped(filled, came))
        self.num_started += 1
        self.num_bytes += sum(whole.nbytes for whole in wholes.values()) * (self.group.size - 1) // self.group.size
        for whole in wholes.values():
            self.sent.add(whole, self.group, passes=1)
        self.finish(self.bound)

    def _swapped(self, filled: Open, came: range) -> _Reduction:
        """Starts to exchange rows instead of summing them: each rank gets its rows of every rank's gradient.

        came: the micro-batches of the ranks' gradients.
        """
        transport = self.group.transport(REDUCE)
        wholes, size = filled.wholes, self.group.size
        shapes = [(size, shard_of(param).size, *param.shape[1:]) for param in wholes]
        received = self._lent(shapes, filled.lease)
        # In the order of backwards, as for the reduce-scatter in `_reduced`.
        works = [
            transport.all_to_all(rows, whole.view(rows.shape), what=f"the gradient of {param.name}")
            for rows, (param, whole) in zip(received, wholes.items(), strict=True)
        ]
        owned = list(zip(wholes, received, strict=True))
        return _Reduction(Together(works), owned, filled.lease, came, filled.bucket.layer)

    def _reduced(self, filled: Open) -> _Reduction:
        """Starts the reduce-scatter of a bucket."""
        bucket, wholes = filled.bucket, filled.wholes
        transport = self.group.transport(REDUCE)
        scratch = [(transport.num_scratch_rows(shard_of(param).size), *param.shape[1:]) for param in wholes]
        received = self._lent(scratch, filled.lease)
        what = f"the gradients of {bucket.name}"
        contents = checksum(param.name for param in wholes)
        # In the order of backwards, the same on all ranks of `wp`: they run the same actions on the same layers. If the data
        # decides which modules run, and a bucket is less than a layer, ranks detect it by the checksum of names.
        work = transport.reduce_scatter(list(wholes.values()), received, what=what, contents=contents)
        owned = [(param, self._own(param, whole)) for param, whole in wholes.items()]
        return _Reduction(work, owned, filled.lease)

    def _lent(self, shapes: Sequence[tuple[int, ...]], lease: ExitStack) -> list[Tensor]:
        """Leases one buffer of the pool until `lease` closes; returns views of these shapes, of the store's dtype."""
        starts, numel = offsets(shapes, ALIGNMENT_BYTES // self.store.dtype.itemsize)
        if numel:
            flat = lease.enter_context(self.pool.lease((numel,), self.store.dtype, self.store.device))
            self._live_bytes += flat.nbytes
            self.max_live_bytes = max(self.max_live_bytes, self._live_bytes)
            lease.callback(self._returned, flat.nbytes)
        else:
            flat = torch.empty(0, dtype=self.store.dtype, device=self.store.device)
        return views_of(flat, starts, shapes)

    def _end(self, reduction: _Reduction) -> None:
        """Waits until the peers have received this rank's data, then returns the buffer to the pool."""
        reduction.work.wait_sent()
        reduction.lease.close()
        self._live -= len(reduction.owned)

    def _returned(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes

    def _own(self, param: Param, whole: Tensor) -> Tensor:
        """Returns this rank's rows of `whole`, a view; padding rows included."""
        rows = shard_of(param).size
        return whole[self.group.coord * rows : (self.group.coord + 1) * rows]
