"""Embeddings sharded by columns: each rank of `wp` looks up its columns for the tokens of all ranks.

    forward    ids [n] ──all_gather──> [wp n] ──local columns──> [wp, n, h / wp] ──all_to_all──> local tokens' vectors [n, h]
    backward   g [n, h] ──all_to_all, in the background──> local columns' g [wp n, h / wp] ──summed by id──> store

Tables are not gathered and their gradients are not reduced, so no rank holds them in full. The exchanges are as large as the
vectors of the tokens, once in each direction. The sum over all tokens of `wp` is already the sum over `wp`, so the store needs
no other reduction. Ranks may have different numbers of tokens, which are padded to the largest number.
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
from sley_isp.sharded_module import get_shard, is_shardable, needs_shard_gradients

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group
    from sley_core.api.model import Layer
    from sley_core.api.parts import Param, Parts
    from sley_isp.communicator import Counters


class TokenGather:
    """Gathers token tensors over `group`, whose ranks must run the same microbatches in the same order."""

    def __init__(self, group: Group, device: Device, counters: Counters) -> None:
        self.group = group
        self.device = device
        self.counters = counters

    def max_tokens(self, num_tokens: int) -> int:
        """Returns the largest `num_tokens` of all ranks. Blocks, since sizes must be known before tokens are sent."""
        counts = torch.empty(self.group.size, dtype=torch.int64, device=self.device.torch_device)
        local_count = torch.full((1,), num_tokens, dtype=torch.int64, device=self.device.torch_device)
        self.gather([counts], [local_count], "numbers of tokens")
        return int(self.device.read(counts.max(), [num_tokens])[0])

    def gather_with_padding(self, tensors: Sequence[Tensor], fill_values: Sequence[int], label: str) -> list[Tensor]:
        """Gathers `tensors` [n, ...] with two exchanges, and returns them as [size x largest n, ...]. Blocks.

        fill_values: the value that pads each tensor to the largest n.
        """
        length = self.max_tokens(len(tensors[0]))
        padded = [pad_tokens(tensor, length, value) for tensor, value in zip(tensors, fill_values, strict=True)]
        full = [tensor.new_empty((self.group.size * length, *tensor.shape[1:])) for tensor in padded]
        self.gather(full, padded, label)
        return full

    def gather(self, full: Sequence[Tensor], tensors: Sequence[Tensor], label: str) -> None:
        """Fills each of `full` [size x n, ...] with the `tensors` [n, ...] of all ranks. Blocks until sends are complete."""
        work = self.group.transport("gather").all_gather(full, tensors, label=label)
        for tensor in full:
            self.counters.sent.add(tensor, self.group, passes=1)
        work.wait()
        work.wait_sent()


def pad_tokens(tensor: Tensor, length: int, fill_value: int = 0) -> Tensor:
    """Returns `tensor` [n, ...], padded with `fill_value` to a contiguous [length, ...], or the tensor itself."""
    if len(tensor) == length:
        return tensor.contiguous()
    padded = tensor.new_empty((length, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    padded[len(tensor) :] = fill_value
    return padded


class ColumnEmbedding:
    """Replaces the forward of the embedding `module` in the layer `layer`. param: the table, sharded by columns."""

    def __init__(self, owner: ColumnEmbeddings, name: str, layer: str, module: nn.Embedding, param: Param) -> None:
        self.owner = owner
        self.name = name
        self.layer = layer
        self.module = module
        self.param = param

    @property
    def shard(self) -> Tensor:
        """This rank's columns of the table."""
        shard = get_shard(self.module, "weight")
        assert shard is not None, self.name
        return shard

    def forward(self, input: Tensor) -> Tensor:
        """Returns the vectors of `input`, with exchanges over `wp`."""
        if type(self.module._parameters["weight"]) is not StandIn:  # `torch.func.functional_call` replaced the weight
            return nn.Embedding.forward(self.module, input)
        self.owner.prepare_lookup(self.layer)
        if not torch.is_grad_enabled():
            return self.look_up(input)[0]
        out: Tensor = _Lookup.apply(input, self.shard, self)  # type: ignore[no-untyped-call]
        return out

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors [..., h] of `tokens` [...], and the tokens of all ranks [size x n]. Blocks."""
        size, hidden = self.owner.token_gather.group.size, self.param.shape[1]
        (ids,) = self.owner.token_gather.gather_with_padding([tokens.reshape(-1)], [0], f"the tokens of {self.name}")
        self.owner.count_bytes(ids)
        columns = F.embedding(ids, self.shard.detach()).view(size, len(ids) // size, -1)
        output = torch.empty_like(columns)
        work = self.owner.all_to_all(output, columns, "gather", f"the vectors of {self.name}")
        work.wait()
        work.wait_sent()
        return join_columns(output, tokens.numel(), hidden).view(*tokens.shape, hidden), ids


class ColumnEmbeddings:
    """Exchanges the vectors and gradients of all column-sharded embeddings of a rank, over the group of `token_gather`.

    prepare_lookup: is called with the name of an embedding's layer before the table is read. can_overlap: returns whether
    gradient exchanges may outlive the call that starts them. All ranks of the group run the same actions on the same layers in
    the same order, and so make the same exchanges.
    """

    def __init__(
        self, token_gather: TokenGather, parts: Parts, prepare_lookup: Callable[[str], None], can_overlap: Callable[[], bool]
    ) -> None:
        self.token_gather = token_gather
        self.store = parts.store
        self.queue = parts.queue
        self.prepare_lookup = prepare_lookup
        self.can_overlap = can_overlap
        self.embeddings: list[ColumnEmbedding] = []
        self._in_flight: deque[_GradientExchange] = deque()
        self._num_new_exchanges = 0
        self._deferred: list[_GradientExchange] = []

    def add(self, name: str, layer: str, module: nn.Embedding, param: Param) -> ColumnEmbedding:
        """Adds an embedding, and returns the object whose `forward` must replace that of `module`."""
        self.embeddings.append(ColumnEmbedding(self, name, layer, module, param))
        self.token_gather.counters.add("embedding_exchanges", 0)
        return self.embeddings[-1]

    def all_to_all(self, output: Tensor, tensor: Tensor, channel: str, label: str) -> Work:
        """Starts an all-to-all of `tensor` on `channel`, and counts it."""
        self.token_gather.counters.add("embedding_exchanges", 1)
        self.count_bytes(output)
        self.token_gather.counters.sent.add(tensor, self.token_gather.group, passes=1)
        return self.token_gather.group.transport(channel).all_to_all(output, tensor, label=label)

    def count_bytes(self, output: Tensor) -> None:
        """Counts the bytes of `output` that came from peers."""
        size = self.token_gather.group.size
        self.token_gather.counters.add("embedding_bytes", output.nbytes * (size - 1) // size)

    def start_gradient(self, embedding: ColumnEmbedding, gradient: Tensor, ids: Tensor) -> None:
        """Starts to exchange the gradient of the vectors of `ids`.

        The store has the table's gradient after `finish_action`, or for an action I after its W. Waits if exchanges may not
        overlap.
        """
        self.store.check_open(embedding.param)  # before anything is sent
        exchange = _GradientExchange(embedding, gradient, ids)
        if self.queue.is_collecting:
            self._deferred.append(exchange)
            self.queue.put(partial(self._finish_deferred, exchange))
        elif self.can_overlap():
            self._in_flight.append(exchange)
            self._num_new_exchanges += 1
        else:
            exchange.finish()

    def _finish_deferred(self, exchange: _GradientExchange) -> None:
        self._deferred.remove(exchange)
        exchange.finish()

    def finish_action(self, *, is_drain: bool) -> None:
        """Finishes the exchanges of earlier actions, or all exchanges if `is_drain`."""
        num_remaining = 0 if is_drain else self._num_new_exchanges
        self._num_new_exchanges = 0
        while len(self._in_flight) > num_remaining:
            self._in_flight.popleft().finish()

    def discard(self) -> None:
        """Waits for all exchanges of a failed step and discards their results."""
        for exchange in (*self._in_flight, *self._deferred):
            exchange.work.wait_sent()
        self._in_flight.clear()
        self._deferred.clear()
        self._num_new_exchanges = 0


class _GradientExchange:
    """Sends the gradient of an embedding's vectors to the ranks that hold the columns. Starts at construction."""

    def __init__(self, embedding: ColumnEmbedding, gradient: Tensor, ids: Tensor) -> None:
        size = embedding.owner.token_gather.group.size
        vectors = gradient.reshape(-1, gradient.shape[-1])
        self._embedding = embedding
        self._ids = ids
        self._columns = split_columns(vectors, size, len(ids) // size, embedding.shard.shape[1])
        self._received = torch.empty_like(self._columns)
        label = f"the gradient of the vectors of {embedding.name}"
        self.work = embedding.owner.all_to_all(self._received, self._columns, "reduce", label)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the exchange, and adds each token's gradient to its row in the store, without a shard-sized temporary."""
        self.work.wait()
        rows = self._received.flatten(0, 1)
        padding = self._embedding.module.padding_idx
        if padding is not None:
            rows.masked_fill_((self._ids == padding).unsqueeze(1), 0.0)
        self._embedding.owner.store.add_rows(self._embedding.param, self._ids, rows)
        self.work.wait_sent()


class _Lookup(torch.autograd.Function):
    """Makes the lookup differentiable. The shard is an input whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, _weight: Tensor, embedding: ColumnEmbedding) -> Tensor:
        """Saves the tokens of all ranks if the table is trainable."""
        vectors, ids = embedding.look_up(tokens)
        ctx.embedding = embedding
        ctx.save_for_backward(ids if embedding.param.trainable else None)
        return no_view(vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.embedding.param.trainable and needs_shard_gradients(ctx):
            assert ids is not None, f"{ctx.embedding.name} was unfrozen between a forward and its backward"
            ctx.embedding.owner.start_gradient(ctx.embedding, gradient, ids)
        return None, None, None


def join_columns(parts: Tensor, num_tokens: int, hidden: int) -> Tensor:
    """Returns [num_tokens, hidden] from `parts` [size, n, width], without the padding of tokens and columns."""
    full = parts[:, :num_tokens].transpose(0, 1).reshape(num_tokens, parts.shape[0] * parts.shape[2])
    return full if full.shape[1] == hidden else full[:, :hidden].contiguous()


def split_columns(vectors: Tensor, size: int, length: int, width: int) -> Tensor:
    """Reverses `join_columns`: returns a contiguous [size, length, width], padded with zeros."""
    if vectors.shape[1] != size * width:
        vectors = F.pad(vectors, (0, size * width - vectors.shape[1]))
    return pad_tokens(vectors, length).view(length, size, width).transpose(0, 1).contiguous()


def check_embeddings(layers: Sequence[Layer]) -> None:
    """Raises PlanError "embedding-hidden" if there is no plain embedding, or if another module also holds a table.

    For example, a head that is tied to a table needs the table's full rows.
    """
    tables: dict[int, str] = {}
    other_parameters: dict[int, str] = {}
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            for attribute, parameter in module._parameters.items():
                is_table = type(module) is nn.Embedding and is_shardable(module, attribute)
                (tables if is_table else other_parameters).setdefault(id(parameter), name)
    if not tables:
        raise _embedding_error("no layer has a plain nn.Embedding, whose table could be sharded by columns", "remove the key")
    for table, name in tables.items():
        if table in other_parameters:
            message = f"`{other_parameters[table]}` shares the table of `{name}` and needs its full rows"
            raise _embedding_error(message, "use a separate weight there (in `models.llama`, set `tie_embeddings = false`)")


def _embedding_error(message: str, hint: str) -> PlanError:
    return PlanError("embedding-hidden", message, path=("weights", "embedding"), hint=f'{hint}, or set `embedding = "gather"`')
