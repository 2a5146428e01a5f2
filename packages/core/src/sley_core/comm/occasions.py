"""A launcher's store, and unused parts of it: it may have been used before, by ranks that the launcher started earlier, and by
this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them
from torch.distributed.rendezvous import rendezvous

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
    if key not in _stores or not _answers(_stores[key]):
        store: Store = next(rendezvous(environ.get(STORE, "env://"), rank, size, timeout=timeout))[0]
        _stores.clear()
        _stores[key] = store
    return _stores[key]


def _answers(store: Store) -> bool:
    """Returns whether a store that was opened before is still there."""
    try:
        store.check(["anything"])
    except (RuntimeError, ValueError):
        return False
    return True


def fresh(store: Store, environ: Mapping[str, str], what: str) -> PrefixStore:
    """Returns a part of `store` that nobody has used, the same one on all ranks, provided that all call this equally often for
    `what`.

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
