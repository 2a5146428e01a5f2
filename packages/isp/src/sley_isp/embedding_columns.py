"""Embeddings whose tables are cut by columns: each rank of `wp` looks up its part of every rank's tokens.

    forward    ids [n] ──gather──> [wp n] ──own columns──> [wp, n, h / wp] ──swap──> full vectors of own tokens [n, h]
    backward   g [n, h] ──swap, in the background──> own columns' g [wp n, h / wp] ──summed by id──> store

No table is gathered and no gradient of one is reduced, nor does either exist in full: the exchanges are as large as the tokens'
vectors, once in each direction. The sum over all tokens of `wp` is already the sum over `wp`, so the store needs no other
reduction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.api.comm import GATHER, REDUCE, Work
from sley_core.api.weights import StandIn, no_view
from sley_core.errors import PlanError
from sley_isp.sites import is_plain, is_summed, own_of
from sley_isp.tokens import AllTokens, padded

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group, SentBytes
    from sley_core.api.model import Layer
    from sley_core.api.parts import GradientStore, Param, WeightQueue


class ShardedEmbedding:
    """Replaces the forward of one embedding, of layer `layer`, whose weight is `param`."""

    def __init__(self, columns: Columns, name: str, layer: str, module: nn.Module, param: Param) -> None:
        self.columns = columns
        self.name = name
        self.layer = layer
        self.module = module
        self.param = param

    @property
    def shard(self) -> nn.Parameter | None:
        """This rank's columns of the table."""
        return own_of(self.module, "weight")

    def forward(self, input: Tensor) -> Tensor:
        """Computes the embedding while the run is open; exchanges over `wp`."""
        if type(self.module._parameters["weight"]) is not StandIn:  # another tensor, by `torch.func.functional_call`
            return nn.Embedding.forward(cast(nn.Embedding, self.module), input)
        self.columns.before(self)
        if not torch.is_grad_enabled():
            return self.columns.look_up(self, input)[0]
        out: Tensor = _LookUp.apply(input, self.shard, self)  # type: ignore[no-untyped-call]  # torch's
        return out


class Columns:
    """Makes the exchanges of all tables of a rank over `group`, which is `wp`.

    All its ranks run the same actions on the same layers in one order, forward and backward, and so make the same exchanges.
    before: called with a table before it is read. is_behind: returns whether the gradients' exchanges may outlive the call that
    started them. num_exchanges, num_bytes: exchanges of vectors and of their gradients, and bytes received by them and as ids;
    since the beginning. sent: counts all that is sent. device: of the rank.
    """

    def __init__(
        self,
        group: Group,
        store: GradientStore,
        queue: WeightQueue,
        before: Callable[[ShardedEmbedding], None],
        is_behind: Callable[[], bool],
        sent: SentBytes,
        device: Device,
    ) -> None:
        self.group = group
        self.store = store
        self.queue = queue
        self.before = before
        self.is_behind = is_behind
        self.tokens = AllTokens(group, device, sent)
        self.sent = sent
        self.tables: list[ShardedEmbedding] = []
        self.num_exchanges = 0
        self.num_bytes = 0
        self._under_way: deque[_Gradient] = deque()
        self._num_new = 0
        self._put_off: list[_Gradient] = []

    def look_up(self, table: ShardedEmbedding, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors [..., h] of `tokens` [...], and all ranks' tokens [size x most]; blocks on both exchanges."""
        (of_all,) = self.tokens.of_all([tokens.reshape(-1)], [0], f"the tokens of {table.name}")
        self.num_bytes += self._foreign(of_all)
        weight = table.shard
        assert weight is not None, table.name
        size, most = self.group.size, len(of_all) // self.group.size
        sent = F.embedding(of_all, weight.detach()).view(size, most, weight.shape[1])
        received = torch.empty_like(sent)
        work = self.swap(received, sent, GATHER, f"the vectors of {table.name}")
        work.wait()
        work.wait_sent()
        hidden = table.param.shape[1]
        return whole_vectors(received, tokens.numel(), hidden).view(*tokens.shape, hidden), of_all

    def swap(self, received: Tensor, sent: Tensor, lane: str, what: str) -> Work:
        """Starts an all-to-all over `wp` on `lane`, and counts it."""
        self.num_exchanges += 1
        self.num_bytes += self._foreign(received)
        self.sent.add(sent, self.group, passes=1)
        return self.group.transport(lane).all_to_all(received, sent, what=what)

    def take_gradient(self, table: ShardedEmbedding, gradient: Tensor, of_all: Tensor) -> None:
        """Starts the exchange of the gradient of what `look_up` returned; the table's gradient is in the store after `leave`.

        If the exchange may not overlap, it is in the store on return; within an I it is there once the W has run.
        """
        self.store.check_open(table.param)  # before anything is sent
        started = _Gradient(self, table, gradient, of_all)
        if self.queue.is_collecting:
            self._put_off.append(started)
            self.queue.put(partial(self._finish_put_off, started))
        elif self.is_behind():
            self._under_way.append(started)
            self._num_new += 1
        else:
            started.finish()

    def leave(self, *, everything: bool) -> None:
        """Ends an action: finishes the exchanges that were in flight when it began, or all if `everything`."""
        left = 0 if everything else self._num_new
        self._num_new = 0
        while len(self._under_way) > left:
            self._under_way.popleft().finish()

    def forget(self) -> None:
        """Waits for all exchanges and discards their results, after a failed step."""
        for gradient in (*self._under_way, *self._put_off):
            gradient.work.wait_sent()
        self._under_way.clear()
        self._put_off.clear()
        self._num_new = 0

    def _foreign(self, tensor: Tensor) -> int:
        """Returns the bytes of `tensor` that come from peers, if each rank contributes equally much."""
        return tensor.nbytes * (self.group.size - 1) // self.group.size

    def _finish_put_off(self, gradient: _Gradient) -> None:
        self._put_off.remove(gradient)
        gradient.finish()


class _Gradient:
    """Holds the gradient of a table's vectors, in flight to the ranks that have their columns."""

    def __init__(self, columns: Columns, table: ShardedEmbedding, gradient: Tensor, of_all: Tensor) -> None:
        size = columns.group.size
        width = table.param.parameter.shape[1]
        self._columns = columns
        self._table = table
        self._tokens = of_all
        self._sent = parts_of_vectors(gradient.reshape(-1, gradient.shape[-1]), size, len(of_all) // size, width)
        self._received = torch.empty_like(self._sent)
        self.work = columns.swap(self._received, self._sent, REDUCE, f"the gradient of the vectors of {table.name}")

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the exchange and adds each token's gradient to its row of the table's, without a shard-sized temporary."""
        self.work.wait()
        rows = self._received.flatten(0, 1)
        padding = getattr(self._table.module, "padding_idx", None)
        if padding is not None:
            rows.masked_fill_((self._tokens == padding).unsqueeze(1), 0.0)
        self._columns.store.add_rows(self._table.param, self._tokens, rows)
        self.work.wait_sent()


class _LookUp(torch.autograd.Function):
    """Makes the lookup differentiable; the shard is an input, with None as its gradient, as at any site."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, _weight: Tensor, table: ShardedEmbedding) -> Tensor:
        """Returns the vectors of `tokens`; saves all ranks' tokens if the table is trained."""
        vectors, of_all = table.columns.look_up(table, tokens)
        ctx.table = table
        ctx.save_for_backward(of_all if table.param.trainable else None)
        return no_view(vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Starts the exchange of the vectors' gradient, if the table is trained."""
        (of_all,) = ctx.saved_tensors
        if ctx.table.param.trainable and is_summed(ctx):
            assert of_all is not None, f"{ctx.table.name} was unfrozen between a forward and its backward"
            ctx.table.columns.take_gradient(ctx.table, gradient, of_all)
        return None, None, None


def whole_vectors(parts: Tensor, num_tokens: int, hidden: int) -> Tensor:
    """Returns [num_tokens, hidden] from `parts` [size, most, width], without the padding of tokens and columns."""
    whole = parts[:, :num_tokens].transpose(0, 1).reshape(num_tokens, parts.shape[0] * parts.shape[2])
    return whole if whole.shape[1] == hidden else whole[:, :hidden].contiguous()


def parts_of_vectors(vectors: Tensor, size: int, most: int, width: int) -> Tensor:
    """Undoes `whole_vectors`: returns [size, most, width], contiguous, padded with zeros."""
    if vectors.shape[1] != size * width:
        vectors = F.pad(vectors, (0, size * width - vectors.shape[1]))
    return padded(vectors, most).view(most, size, width).transpose(0, 1).contiguous()


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
            message = f"`{others[table]}` holds the table of `{name}` too, and needs whole rows of it"
            raise _refused(message, "give it a weight of its own (`models.llama`: `tie_embeddings = false`)")


def _refused(message: str, hint: str) -> PlanError:
    """Returns the PlanError "embedding-hidden"."""
    return PlanError("embedding-hidden", message, path=("weights", "embedding"), hint=f'{hint}; or `embedding = "gather"`')
