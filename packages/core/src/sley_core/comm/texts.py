"""Exchanges small values between ranks as JSON: a process that can reach a communicator's port must not make a rank run code.

torch's own collectives of objects unpickle what they receive; gloo's ports accept connections of any user of the host.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_AT_ONCE = 1016
"""How many bytes of a text are sent in the same message as its length."""

_LENGTH = 8


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gathers every rank's `value`; returns them in the order of the group's ranks. Blocks. Uses the default group if none is
    given.

    value: serialisable as JSON; tuples come back as lists, and keys of mappings as strings.
    """
    mine = _encoded(value, group)
    length = torch.tensor([mine.numel()], dtype=torch.int64, device=mine.device).view(torch.uint8)
    heads = _gather(torch.cat((length, mine[:_AT_ONCE])), _LENGTH + _AT_ONCE, group)
    lengths = [int(head[:_LENGTH].view(torch.int64)) for head in heads]
    more = max(lengths) - _AT_ONCE
    # All members see the same lengths.
    rests = _gather(mine[_AT_ONCE:], more, group) if more > 0 else [mine[:0]] * len(heads)
    texts = (torch.cat((head[_LENGTH:], rest)) for head, rest in zip(heads, rests, strict=True))
    return [_decoded(text[:length]) for text, length in zip(texts, lengths, strict=True)]


def _gather(mine: Tensor, num_bytes: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Returns every rank's `mine`, padded to `num_bytes`. A collective over `group`, whose members all call `gather_values`."""
    found = [torch.zeros(num_bytes, dtype=torch.uint8, device=mine.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, torch.nn.functional.pad(mine, (0, num_bytes - mine.numel())), group=group)
    return found


def value_of_first(value: Any) -> Any:
    """Broadcasts the value of rank 0 over the default group, and returns it on all ranks. Blocks. value: as in `gather_values`,
    used on rank 0 only.
    """
    mine = _encoded(value, None)
    length = torch.tensor([mine.numel()], device=mine.device)
    # All ranks of the default group: how long the text is, then the text.
    dist.broadcast(length, src=0)
    text = mine if dist.get_rank() == 0 else torch.zeros(int(length), dtype=torch.uint8, device=mine.device)
    dist.broadcast(text, src=0)
    return _decoded(text)


def _encoded(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decoded(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))
