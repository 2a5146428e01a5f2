"""Connects ranks at start-up by the launcher's store, and exchanges small values as JSON.

torch's object collectives unpickle their messages, and gloo's ports accept connections of any user of the host. A process that
reaches a port must not make a rank run code. Earlier ranks of the launcher, or this process, may have used the store before.
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


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's `value` in the order of ranks, by default over the default group. Blocks.

    value: serialisable as JSON; tuples return as lists, and keys of mappings as strings.
    """
    local = _encode(value, group)
    sizes = _gather_padded(torch.tensor([local.numel()], dtype=torch.int64, device=local.device), 1, group)
    lengths = [int(size) for size in sizes]
    texts = _gather_padded(local, max(lengths), group)  # all members see the same lengths
    return [json.loads(bytes(text[:length].tolist())) for text, length in zip(texts, lengths, strict=True)]


def _gather_padded(local: Tensor, numel: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Returns every rank's `local`, padded to `numel` elements. A collective over `group`."""
    outputs = [local.new_zeros(numel) for _ in range(dist.get_world_size(group))]
    dist.all_gather(outputs, torch.nn.functional.pad(local, (0, numel - local.numel())), group=group)
    return outputs


def _encode(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


STORE = "SLEY_STORE"
"""The environment variable in which a local launch names its file store; else `env://` is used."""

_STORE_KEYS = (STORE, "MASTER_ADDR", "MASTER_PORT", "RANK")
_num_uses_by_purpose: Counter[tuple[str | None, ...]] = Counter()
_open_stores: dict[tuple[str | None, ...], Store] = {}


def open_store(environ: Mapping[str, str], rank: int, size: int, timeout: timedelta) -> Store:
    """Returns the store that the launcher's environment names. Blocks until the store exists.

    A store is opened once, and stays open until another one is opened. The last rank that closes a file store deletes it, even
    if another rank has just opened it again. A store at an address ends with rank 0's, to which another rank may just have
    reconnected. Raises RuntimeError or ValueError, as torch does.
    """
    key = (*(environ.get(name) for name in _STORE_KEYS), str(size))
    if key in _open_stores:
        with suppress(RuntimeError, ValueError):
            _open_stores[key].check(["anything"])
            return _open_stores[key]
    store: Store = next(rendezvous(environ.get(STORE, "env://"), rank, size, timeout=timeout))[0]
    _open_stores.clear()
    _open_stores[key] = store
    return store


def unused_part(store: Store, environ: Mapping[str, str], purpose: str) -> PrefixStore:
    """Returns an unused part of `store`, the same on all ranks if they call this the same number of times for `purpose`.

    environ: the launcher's environment, which identifies the store.
    """
    key = (purpose, *(environ.get(name) for name in _STORE_KEYS))
    _num_uses_by_purpose[key] += 1
    # After a restart the store still has the addresses of ended ranks, which gloo must not use. Several hosts count their
    # restarts separately.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host(environ) else "0"
    return PrefixStore(f"attempt {attempt}, {purpose} {_num_uses_by_purpose[key]}", store)


def reset_stores() -> None:
    """Resets the counts and closes open stores, as in a new process."""
    _num_uses_by_purpose.clear()
    _open_stores.clear()


def is_one_host(environ: Mapping[str, str]) -> bool:
    """Returns whether one torchrun agent or none has started all ranks: then its store outlives them."""
    return environ.get("GROUP_WORLD_SIZE", "1") == "1"
