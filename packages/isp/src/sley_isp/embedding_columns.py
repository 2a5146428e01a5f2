"""Embeddings whose tables are cut by columns: each rank of `wp` looks up its part of every rank's tokens.

    forward    ids [n] ──all_gather──> [wp n] ──own columns──> [wp, n, h / wp] ──all_to_all──> vectors of own tokens [n, h]
    backward   g [n, h] ──all_to_all, in the background──> own columns' g [wp n, h / wp] ──summed by id──> store

No table is gathered and no gradient of one is reduced, nor does either exist in full: the exchanges are as large as the tokens'
vectors, once in each direction. The sum over all tokens of `wp` is already the sum over `wp`, so the store needs no other
reduction. The number of tokens may differ between ranks: they are padded to the largest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.api.comm import Work
from sley_core.api.weights import StandIn, no_view
from sley_core.errors import PlanError
from sley_isp.sharded_module import is_plain, is_summed, shard_in

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group
    from sley_core.api.model import Layer
    from sley_core.api.parts import GradientStore, Param, WeightQueue
    from sley_isp.communicator import Counters


class TokenGather:
    """Gathers tokens, and tensors of tokens, over `group`, whose ranks must run the same micro-batches in the same order."""

    def __init__(self, group: Group, device: Device, counters: Counters) -> None:
        self.group = group
        self.device = device
        self.counters = counters

    def largest(self, num_tokens: int) -> int:
        """Returns the largest `num_tokens` of any rank; blocks, as sizes must be known before tokens are sent."""
        counts = torch.empty(self.group.size, dtype=torch.int64, device=self.device.torch_device)
        own = torch.full((1,), num_tokens, dtype=torch.int64, device=self.device.torch_device)
        self.gather([counts], [own], "numbers of tokens")
        return int(self.device.read(counts.max(), [num_tokens])[0])

    def all_tokens(self, own: Sequence[Tensor], fills: Sequence[int], what: str) -> list[Tensor]:
        """Returns every rank's tensors `own` [n, ...], padded with `fills`, in the order of the group: [size x largest n, ...].

        Blocks on two gathers.
        """
        length = self.largest(len(own[0]))
        padded = [pad_tokens(tensor, length, fill) for tensor, fill in zip(own, fills, strict=True)]
        full = [tensor.new_empty((self.group.size * length, *tensor.shape[1:])) for tensor in padded]
        self.gather(full, padded, what)
        return full

    def gather(self, full: Sequence[Tensor], own: Sequence[Tensor], what: str) -> None:
        """Fills each of `full` [size x n, ...] with the ranks' `own` [n, ...]; blocks until it is complete on both sides."""
        work = self.group.transport("gather").all_gather(full, own, what=what)
        for tensor in full:
            self.counters.sent.add(tensor, self.group, passes=1)
        work.wait()
        work.wait_sent()


def pad_tokens(tensor: Tensor, length: int, fill: int = 0) -> Tensor:
    """Returns `tensor` [n, ...] extended with `fill` to [length, ...], contiguous; itself if it is already."""
    if len(tensor) == length:
        return tensor.contiguous()
    padded = tensor.new_empty((length, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    padded[len(tensor) :] = fill
    return padded


class ColumnTable:
    """Replaces the forward of embedding `module`, in layer `layer`, whose weight is `param`."""

    def __init__(self, tables: ColumnTables, name: str, layer: str, module: nn.Embedding, param: Param) -> None:
        self.tables = tables
        self.name = name
        self.layer = layer
        self.module = module
        self.param = param

    @property
    def shard(self) -> Tensor:
        """This rank's columns of the table."""
        shard = shard_in(self.module, "weight")
        assert shard is not None, self.name
        return shard

    def forward(self, input: Tensor) -> Tensor:
        """Computes the embedding while the run is open; exchanges over `wp`."""
        if type(self.module._parameters["weight"]) is not StandIn:  # another tensor, by `torch.func.functional_call`
            return nn.Embedding.forward(self.module, input)
        self.tables.before(self.layer)
        if not torch.is_grad_enabled():
            return self.look_up(input)[0]
        out: Tensor = _LookUp.apply(input, self.shard, self)  # type: ignore[no-untyped-call]  # torch's
        return out

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors [..., h] of `tokens` [...], and all ranks' tokens [size x n]; blocks on both exchanges."""
        size, hidden = self.tables.tokens.group.size, self.param.shape[1]
        (ids,) = self.tables.tokens.all_tokens([tokens.reshape(-1)], [0], f"the tokens of {self.name}")
        self.tables.count_bytes(ids)
        sent = F.embedding(ids, self.shard.detach()).view(size, len(ids) // size, -1)
        received = torch.empty_like(sent)
        work = self.tables.all_to_all(received, sent, "gather", f"the vectors of {self.name}")
        work.wait()
        work.wait_sent()
        return join_columns(received, tokens.numel(), hidden).view(*tokens.shape, hidden), ids


class ColumnTables:
    """Makes the exchanges of all tables of a rank over `wp`, the group of `tokens`.

    All its ranks run the same actions on the same layers in one order, forward and backward, and so make the same exchanges.
    before: called with the name of a table's layer before it is read. is_overlapping: returns whether the exchanges of
    gradients may outlive the call that started them.
    """

    def __init__(
        self,
        tokens: TokenGather,
        store: GradientStore,
        queue: WeightQueue,
        before: Callable[[str], None],
        is_overlapping: Callable[[], bool],
    ) -> None:
        self.tokens = tokens
        self.store = store
        self.queue = queue
        self.before = before
        self.is_overlapping = is_overlapping
        self.tables: list[ColumnTable] = []
        self._in_flight: deque[_Gradient] = deque()
        self._num_new = 0
        self._deferred: list[_Gradient] = []

    def add(self, name: str, layer: str, module: nn.Embedding, param: Param) -> ColumnTable:
        """Adds an embedding, whose forward is to be replaced by that of the result."""
        self.tables.append(ColumnTable(self, name, layer, module, param))
        self.tokens.counters.add("embedding_exchanges", 0)
        return self.tables[-1]

    def all_to_all(self, received: Tensor, sent: Tensor, lane: str, what: str) -> Work:
        """Starts an all-to-all over `wp` on `lane`, and counts it."""
        self.tokens.counters.add("embedding_exchanges", 1)
        self.count_bytes(received)
        self.tokens.counters.sent.add(sent, self.tokens.group, passes=1)
        return self.tokens.group.transport(lane).all_to_all(received, sent, what=what)

    def count_bytes(self, received: Tensor) -> None:
        """Counts the part of a tensor that peers sent."""
        size = self.tokens.group.size
        self.tokens.counters.add("embedding_bytes", received.nbytes * (size - 1) // size)

    def take_gradient(self, table: ColumnTable, gradient: Tensor, ids: Tensor) -> None:
        """Starts the exchange of the gradient of the vectors; the table's gradient is in the store after `leave`.

        If the exchange may not overlap, it is in the store on return; within an I it is there once the W has run.
        """
        self.store.check_open(table.param)  # before anything is sent
        started = _Gradient(table, gradient, ids)
        if self.queue.is_collecting:
            self._deferred.append(started)
            self.queue.put(partial(self._finish_deferred, started))
        elif self.is_overlapping():
            self._in_flight.append(started)
            self._num_new += 1
        else:
            started.finish()

    def _finish_deferred(self, gradient: _Gradient) -> None:
        self._deferred.remove(gradient)
        gradient.finish()

    def leave(self, *, everything: bool) -> None:
        """Ends an action: finishes the exchanges that were in flight when it began, or all if `everything`."""
        at_most = 0 if everything else self._num_new
        self._num_new = 0
        while len(self._in_flight) > at_most:
            self._in_flight.popleft().finish()

    def discard(self) -> None:
        """Waits for all exchanges and discards their results, after a failed step."""
        for gradient in (*self._in_flight, *self._deferred):
            gradient.work.wait_sent()
        self._in_flight.clear()
        self._deferred.clear()
        self._num_new = 0


class _Gradient:
    """The gradient of a table's vectors, in flight to the ranks that have their columns."""

    def __init__(self, table: ColumnTable, gradient: Tensor, ids: Tensor) -> None:
        size = table.tables.tokens.group.size
        vectors = gradient.reshape(-1, gradient.shape[-1])
        self._table = table
        self._ids = ids
        self._sent = split_columns(vectors, size, len(ids) // size, table.shard.shape[1])
        self._received = torch.empty_like(self._sent)
        what = f"the gradient of the vectors of {table.name}"
        self.work = table.tables.all_to_all(self._received, self._sent, "reduce", what)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the exchange and adds each token's gradient to its row of the table's, without a shard-sized temporary."""
        self.work.wait()
        rows = self._received.flatten(0, 1)
        padding = self._table.module.padding_idx
        if padding is not None:
            rows.masked_fill_((self._ids == padding).unsqueeze(1), 0.0)
        self._table.tables.store.add_rows(self._table.param, self._ids, rows)
        self.work.wait_sent()


class _LookUp(torch.autograd.Function):
    """Makes the lookup differentiable; the shard is an input, with None as its gradient, as in any sharded module."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, _weight: Tensor, table: ColumnTable) -> Tensor:
        """Saves all ranks' tokens if the table is trained."""
        vectors, ids = table.look_up(tokens)
        ctx.table = table
        ctx.save_for_backward(ids if table.param.trainable else None)
        return no_view(vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.table.param.trainable and is_summed(ctx):
            assert ids is not None, f"{ctx.table.name} was unfrozen between a forward and its backward"
            ctx.table.tables.take_gradient(ctx.table, gradient, ids)
        return None, None, None


def join_columns(parts: Tensor, num_tokens: int, hidden: int) -> Tensor:
    """Returns [num_tokens, hidden] from `parts` [size, n, width], without the padding of tokens and columns."""
    full = parts[:, :num_tokens].transpose(0, 1).reshape(num_tokens, parts.shape[0] * parts.shape[2])
    return full if full.shape[1] == hidden else full[:, :hidden].contiguous()


def split_columns(vectors: Tensor, size: int, length: int, width: int) -> Tensor:
    """Undoes `join_columns`: returns [size, length, width], contiguous, padded with zeros."""
    if vectors.shape[1] != size * width:
        vectors = F.pad(vectors, (0, size * width - vectors.shape[1]))
    return pad_tokens(vectors, length).view(length, size, width).transpose(0, 1).contiguous()


def check_tables(layers: Sequence[Layer]) -> None:
    """Raises PlanError "embedding-hidden" unless there is a plain embedding and only such modules hold these tables.

    A head that is tied to a table needs full rows of it.
    """
    tables: dict[int, str] = {}
    others: dict[int, str] = {}
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            for attribute, parameter in module._parameters.items():
                is_table = type(module) is nn.Embedding and is_plain(module, attribute)
                (tables if is_table else others).setdefault(id(parameter), name)
    if not tables:
        raise _refused("no layer has a plain nn.Embedding, whose table could be cut along its hidden dim", "leave it out")
    for table, name in tables.items():
        if table in others:
            message = f"`{others[table]}` holds the table of `{name}` too, and needs full rows of it"
            raise _refused(message, "give it a weight of its own (`models.llama`: `tie_embeddings = false`)")


def _refused(message: str, hint: str) -> PlanError:
    return PlanError("embedding-hidden", message, path=("weights", "embedding"), hint=f'{hint}; or `embedding = "gather"`')
