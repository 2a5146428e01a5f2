"""Connects ranks at start-up: the launcher's store, unused parts of it, and small values exchanged as JSON.

torch's own collectives of objects unpickle their messages, and gloo's ports accept connections of any user of the host: a
process that reaches a port must not make a rank run code. A store may be in use already, by ranks that the launcher started
earlier, and by this process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them
from torch.distributed.rendezvous import rendezvous

_AT_ONCE = 1016
"""How many bytes of a text are sent in the same message as its length."""

_LENGTH = 8


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gathers every rank's `value`, by default over the default group, in the order of ranks. Blocks. value: serialisable as
    JSON; tuples come back as lists, and keys of mappings as strings.
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
    every = [torch.zeros(num_bytes, dtype=torch.uint8, device=mine.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, torch.nn.functional.pad(mine, (0, num_bytes - mine.numel())), group=group)
    return every


def _encoded(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decoded(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))


STORE = "SLEY_STORE"
"""The environment variable in which a local launch names its file store; else `env://` is used."""

_PLACE = (STORE, "MASTER_ADDR", "MASTER_PORT", "RANK")
_counts: Counter[tuple[str | None, ...]] = Counter()
_stores: dict[tuple[str | None, ...], Store] = {}


def store_at(environ: Mapping[str, str], rank: int, size: int, timeout: timedelta) -> Store:
    """Returns the store that the launcher's environment names. Blocks until it is there.

    A store is opened once, and stays open until another one is asked for. The last rank that closes a file deletes it, also
    when another has just opened it again and written there; a store at an address ends with rank 0's, to which another rank may
    just have come again. Raises RuntimeError or ValueError, as torch does.
    """
    key = (*(environ.get(name) for name in _PLACE), str(size))
    if key in _stores:
        with suppress(RuntimeError, ValueError):
            _stores[key].check(["anything"])
            return _stores[key]
    store: Store = next(rendezvous(environ.get(STORE, "env://"), rank, size, timeout=timeout))[0]
    _stores.clear()
    _stores[key] = store
    return store


def fresh(store: Store, environ: Mapping[str, str], what: str) -> PrefixStore:
    """Returns a part of `store` that nobody has used, the same one on all ranks if all call this equally often for `what`.
    environ: the launcher's, which identifies the store.
    """
    place = (what, *(environ.get(name) for name in _PLACE))
    _counts[place] += 1
    # After a restart the store still has the addresses of ranks that have ended, which gloo must not find. Several hosts count
    # their restarts separately.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host(environ) else "0"
    return PrefixStore(f"attempt {attempt}, {what} {_counts[place]}", store)


def forget() -> None:
    """Resets the counts and closes what is open, as in a new process."""
    _counts.clear()
    _stores.clear()


def is_one_host(environ: Mapping[str, str]) -> bool:
    """Returns whether one torchrun agent has started all ranks, or none has: then its store outlives them."""
    return environ.get("GROUP_WORLD_SIZE", "1") == "1"
