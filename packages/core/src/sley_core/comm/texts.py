"""Small values between ranks as JSON: whoever else can reach a communicator's port must not make a rank run code.

torch's own collectives of objects unpickle what comes; gloo's ports take connections of any user of the host.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's `value`, in the order of the group's ranks. Blocks. Uses the default group if none is given.

    value: JSON; tuples come back as lists, and keys of mappings as strings.
    """
    mine = _encoded(value, group)
    size = dist.get_world_size(group)
    # Twice, all members alike: how long each text is, then the texts, as long as the longest.
    lengths = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([mine.numel()], device=mine.device), group=group)
    longest = int(max(int(length) for length in lengths))
    texts = [torch.zeros(longest, dtype=torch.uint8, device=mine.device) for _ in range(size)]
    dist.all_gather(texts, torch.nn.functional.pad(mine, (0, longest - mine.numel())), group=group)
    return [_decoded(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]


def value_of_first(value: Any) -> Any:
    """Returns the value of rank 0 on all ranks of the default group. Blocks. value: as in `gather_values`, read on rank
    0 alone.
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
