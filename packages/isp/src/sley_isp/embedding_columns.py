"""Embeddings sharded by columns: each rank of `wp` looks up its columns for the tokens of all ranks.

    forward    ids [n] ──all_gather──> [wp n] ──local columns──> [wp, n, h / wp] ──all_to_all──> local tokens' vectors [n, h]
    backward   g [n, h] ──all_to_all, in the background──> local columns' g [wp n, h / wp] ──summed by id──> store

Tables are not gathered and their gradients are not reduced, so no rank holds them in full. The exchanges are as large as the
vectors of the tokens, once in each direction. The sum over all tokens of `wp` is already the sum over `wp`, so the store needs
no other reduction. Ranks may have different numbers of tokens, which are padded to the largest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.api.comm import Work
from sley_core.api.parts import Handover
from sley_core.api.weights import StandIn, no_view
from sley_core.errors import PlanError
from sley_isp.reduce_scatter import Reduction
from sley_isp.sharded_module import is_shardable, needs_shard_gradients, parameter_users

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group
    from sley_core.api.model import Layer
    from sley_core.api.parts import Param, Parts
    from sley_isp.communicator import Communicator, Counters


class TokenGather:
    """Gathers token tensors over `group`, whose ranks must run the same microbatches in the same order."""

    def __init__(self, group: Group, device: Device, counters: Counters) -> None:
        self.group = group
        self.device = device
        self.counters = counters

    def gather_with_padding(self, tensors: Sequence[Tensor], fill_values: Sequence[int], label: str) -> list[Tensor]:
        """Gathers `tensors` [n, ...] with two exchanges, and returns them as [size x largest n, ...]. Blocks.

        fill_values: the value that pads each tensor to the largest n, which the first exchange finds.
        """
        num_tokens, device = len(tensors[0]), self.device.torch_device
        counts = torch.empty(self.group.size, dtype=torch.int64, device=device)
        self.gather([counts], [torch.full((1,), num_tokens, dtype=torch.int64, device=device)], "numbers of tokens")
        length = int(self.device.read(counts.max(), [num_tokens])[0])
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

    def all_to_all(self, tensor: Tensor, channel: str, label: str) -> tuple[Tensor, Work]:
        """Starts an all-to-all of the rows of `tensor` [size, ...], and returns its output."""
        output = torch.empty_like(tensor)
        self.counters.sent.add(tensor, self.group, passes=1)
        return output, self.group.transport(channel).all_to_all(output, tensor, label=label)


def pad_tokens(tensor: Tensor, length: int, fill_value: int = 0) -> Tensor:
    """Returns `tensor` [n, ...], padded with `fill_value` to a contiguous [length, ...], or the tensor itself."""
    if len(tensor) == length:
        return tensor.contiguous()
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, length - len(tensor)], value=fill_value)


class ColumnEmbedding:
    """Replaces the forward of the embedding `module` in the layer `layer`. param: the table, sharded by columns.

    All ranks of the group run the same actions on the same layers in the same order, and so make the same exchanges.
    """

    def __init__(
        self, communicator: Communicator, layer: str, module: nn.Embedding, param: Param, gather: TokenGather, parts: Parts
    ) -> None:
        self.communicator = communicator
        self.layer = layer
        self.module = module
        self.param = param
        self.token_gather = gather
        self.store = parts.store
        self.wait_for = parts.waits.wait_for
        self.sink = Handover(self._start_reduction, parts.queue)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the vectors of `input`, with exchanges over `wp`."""
        if type(self.module._parameters["weight"]) is not StandIn:  # `torch.func.functional_call` replaced the weight
            return nn.Embedding.forward(self.module, input)
        self.wait_for(self.layer)
        if not torch.is_grad_enabled():
            return self.look_up(input)[0]
        out: Tensor = _Lookup.apply(input, self.param.parameter, self)  # type: ignore[no-untyped-call]
        return out

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors [..., h] of `tokens` [...], and the tokens of all ranks [size x n]. Blocks."""
        size = self.token_gather.group.size
        (ids,) = self.token_gather.gather_with_padding([tokens.reshape(-1)], [0], f"the tokens of {self.param.name}")
        columns = F.embedding(ids, self.param.parameter.detach()).view(size, len(ids) // size, -1)
        output, work = self.token_gather.all_to_all(columns, "gather", f"the vectors of {self.param.name}")
        work.wait()
        work.wait_sent()
        vectors = output[:, : tokens.numel()].transpose(0, 1).flatten(1)[:, : self.param.shape[1]]  # without padding
        return vectors.reshape(*tokens.shape, -1), ids

    def _start_reduction(self, gradient: Tensor, ids: Tensor) -> None:
        """Sends the gradient [n, h] of the vectors to the ranks that hold the columns. ids: the tokens of all ranks."""
        self.store.check_open(self.param)  # before anything is sent
        size, width = self.token_gather.group.size, self.param.parameter.shape[1]
        padding = [0, size * width - gradient.shape[1], 0, len(ids) // size - len(gradient)]
        columns = F.pad(gradient, padding).view(-1, size, width).transpose(0, 1).contiguous()
        output, work = self.token_gather.all_to_all(columns, "reduce", f"the gradient of the vectors of {self.param.name}")

        @torch.no_grad()
        def add_rows() -> None:
            rows = output.flatten(0, 1)
            if self.module.padding_idx is not None:
                rows.masked_fill_((ids == self.module.padding_idx).unsqueeze(1), 0.0)
            self.store.add_rows(self.param, ids, rows)  # without a temporary tensor as large as the shard

        self.communicator.enqueue_reduction(Reduction([work], add_rows, ExitStack(), sent=columns))


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
        embedding: ColumnEmbedding = ctx.embedding
        if embedding.param.trainable and needs_shard_gradients(ctx):
            assert ids is not None, f"{embedding.param.name} was unfrozen between a forward and its backward"
            is_shared = embedding.sink.shares_memory(gradient)
            embedding.sink(gradient.reshape(-1, gradient.shape[-1]), ids, is_shared=is_shared)
        return None, None, None


def check_embeddings(layers: Sequence[Layer]) -> None:
    """Raises PlanError "embedding-hidden" if there is no plain embedding, or if another module also holds a table.

    For example, a head that is tied to a table needs the table's full rows.
    """

    def is_table(module: nn.Module, attribute: str) -> bool:
        return type(module) is nn.Embedding and is_shardable(module, attribute)

    tables = parameter_users(layers, is_table)
    other_users = parameter_users(layers, lambda *location: not is_table(*location))
    if not tables:
        raise _embedding_error("no layer has a plain nn.Embedding, whose table could be sharded by columns", "remove the key")
    for table, name in tables.items():
        if table in other_users:
            message = f"`{other_users[table]}` shares the table of `{name}` and needs its full rows"
            raise _embedding_error(message, "use a separate weight there (in `models.llama`, set `tie_embeddings = false`)")


def _embedding_error(message: str, hint: str) -> PlanError:
    return PlanError("embedding-hidden", message, path=("weights", "embedding"), hint=f'{hint}, or set `embedding = "gather"`')
