"""Embeddings sharded by columns: each rank of `wp` looks up its columns for the tokens of all ranks.

    forward    ids [n] ──all_gather──> [wp n] ──local columns──> [wp, n, h / wp] ──all_to_all──> local tokens' vectors [n, h]
    backward   g [n, h] ──all_to_all, in the background──> local columns' g [wp n, h / wp] ──summed by id──> store

Here n is the number of tokens of a rank, h the size of a vector, and wp the number of ranks. No rank holds a full table. Each
rank sums its columns' gradient over the tokens of all ranks, so no reduction over `wp` follows. Ranks may have different
numbers of tokens, which are padded to the largest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.api.comm import Work
from sley_core.errors import PlanError
from sley_isp.reduce_scatter import Reduction
from sley_isp.sharded_module import ShardedModule, find_parameter_users, is_shardable

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group
    from sley_core.api.model import Layer
    from sley_isp.communicator import Counters


class TokenGather:
    """Gathers tensors with one row per token over `group`, whose ranks must run the same microbatches in the same order."""

    def __init__(self, group: Group, device: Device, counters: Counters) -> None:
        self.group = group
        self.device = device
        self.counters = counters

    def gather_with_padding(self, tensors: Sequence[Tensor], fill_values: Sequence[int], label: str) -> list[Tensor]:
        """Gathers `tensors` [n, ...] of all ranks as [size x largest n, ...], padded with `fill_values`. Blocks."""
        num_tokens, device = len(tensors[0]), self.device.torch_device
        counts = torch.empty(self.group.size, dtype=torch.int64, device=device)
        self.gather([counts], [torch.full((1,), num_tokens, dtype=torch.int64, device=device)], "numbers of tokens")
        length = int(self.device.read(counts.max(), [num_tokens])[0])
        paddings = [[0, 0] * (tensor.ndim - 1) + [0, length - num_tokens] for tensor in tensors]
        padded = [
            F.pad(tensor, padding, value=value) if num_tokens < length else tensor.contiguous()
            for tensor, padding, value in zip(tensors, paddings, fill_values, strict=True)
        ]
        full = [tensor.new_empty((self.group.size * length, *tensor.shape[1:])) for tensor in padded]
        self.gather(full, padded, label)
        return full

    def gather(self, full: Sequence[Tensor], tensors: Sequence[Tensor], label: str) -> None:
        """Fills each of `full` [size x n, ...] with one of `tensors` [n, ...] of all ranks. Blocks until sends are complete."""
        work = self.group.transport("gather").all_gather(full, tensors, label=label)
        for tensor in full:
            self.counters.add(tensor, self.group, passes=1)
        work.wait()
        work.wait_sent()

    def all_to_all(self, tensor: Tensor, channel: str, label: str) -> tuple[Tensor, Work]:
        """Starts an all-to-all of the rows of `tensor` [size, ...], and returns its output and the handle."""
        output = torch.empty_like(tensor)
        self.counters.add(tensor, self.group, passes=1)
        return output, self.group.transport(channel).all_to_all(output, tensor, label=label)


class ColumnEmbedding(ShardedModule):
    """Replaces the forward of an embedding whose table is sharded by columns. All ranks of the group must call it for the same
    microbatches in the same order.
    """

    def compute(self, x: Tensor, *, num_holds: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the vectors [..., h] of the tokens `x` [...], and the tokens of all ranks [size x n]. Blocks."""
        self.parts.waits.wait_for(self.group.layer)
        gather, name = self.communicator.token_gather, self.weight.name
        (ids,) = gather.gather_with_padding([x.reshape(-1)], [0], f"the tokens of {name}")
        columns = F.embedding(ids, self.weight.parameter.detach()).view(gather.group.size, len(ids) // gather.group.size, -1)
        output, work = gather.all_to_all(columns, "gather", f"the vectors of {name}")
        work.wait()
        work.wait_sent()
        vectors = output[:, : x.numel()].transpose(0, 1).flatten(1)[:, : self.weight.shape[1]]  # without padding
        return vectors.reshape(*x.shape, -1), ids

    def _reduce(self, output_gradient: Tensor, inputs: Tensor) -> None:
        """Starts to send the gradient [n, h] of the vectors to the ranks that hold the columns. A callback adds the received
        gradients to the store. inputs: the tokens of all ranks.
        """
        gather, store = self.communicator.token_gather, self.parts.store
        store.check_open(self.weight)  # before anything is sent
        size, width = gather.group.size, self.weight.parameter.shape[1]
        padding = [0, size * width - output_gradient.shape[1], 0, len(inputs) // size - len(output_gradient)]
        columns = F.pad(output_gradient, padding).view(-1, size, width).transpose(0, 1).contiguous()
        output, work = gather.all_to_all(columns, "reduce", f"the gradient of the vectors of {self.weight.name}")

        @torch.no_grad()
        def add_rows() -> None:
            rows = output.flatten(0, 1)
            if isinstance(self.module, nn.Embedding) and self.module.padding_idx is not None:
                rows.masked_fill_((inputs == self.module.padding_idx).unsqueeze(1), 0.0)
            store.add_rows(self.weight, inputs, rows)  # without a temporary tensor as large as the shard

        self.communicator.enqueue_reduction(Reduction([work], add_rows, ExitStack(), sent=columns))


def check_embeddings(layers: Sequence[Layer]) -> None:
    """Raises PlanError "embedding-hidden" if there is no plain embedding, or if another module, such as a tied head, also holds
    a table and needs its full rows.
    """

    def is_table(module: nn.Module, attribute: str) -> bool:
        return type(module) is nn.Embedding and is_shardable(module, attribute)

    tables = find_parameter_users(layers, is_table)
    if not tables:
        raise _embedding_error("no layer has a plain nn.Embedding, whose table could be sharded by columns", "remove the key")
    for table, name in find_parameter_users(layers, lambda *location: not is_table(*location)).items():
        if table in tables:
            message = f"`{name}` shares the table of `{tables[table]}` and needs its full rows"
            raise _embedding_error(message, "use a separate weight there (in `models.llama`, set `tie_embeddings = false`)")


def _embedding_error(message: str, hint: str) -> PlanError:
    return PlanError("embedding-hidden", message, path=("weights", "embedding"), hint=f'{hint}, or set `embedding = "gather"`')
