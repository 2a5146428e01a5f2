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
_files: dict[tuple[str, int, int], Store] = {}


def store_at(environ: Mapping[str, str], rank: int, size: int, timeout: timedelta) -> Store:
    """Returns the store that the launcher's environment names. Blocks until it is there.

    A file is opened once, and stays open until another one is asked for: the last rank that closes it deletes it, also when
    another has just opened it again and written there. Raises RuntimeError or ValueError, as torch does.
    """
    key = environ.get(STORE, "env://"), rank, size
    if key in _files:
        return _files[key]
    store: Store = next(rendezvous(*key, timeout=timeout))[0]
    if STORE in environ:
        _files.clear()
        _files[key] = store
    return store


def fresh(store: Store, environ: Mapping[str, str], what: str) -> PrefixStore:
    """Returns a part of `store` that nobody has used, the same one on all ranks, provided that all call this equally often for
    `what`.

    environ: the launcher's, which identifies the store.
    """
    place = (what, *(environ.get(name) for name in _PLACE))
    _counts[place] += 1
    return PrefixStore(f"attempt {_attempt(environ)}, {what} {_counts[place]}", store)


def forget() -> None:
    """Resets the counts and closes what is open, as in a new process."""
    _counts.clear()
    _files.clear()


def is_one_host(environ: Mapping[str, str]) -> bool:
    """Returns whether one torchrun agent has started all ranks, or none has: then its store outlives them."""
    return environ.get("GROUP_WORLD_SIZE", "1") == "1"


def _attempt(environ: Mapping[str, str]) -> str:
    """Returns how often torchrun has restarted the ranks, "0" on several hosts, whose agents count separately. After a restart
    the store still has the addresses of ranks that have ended, which gloo must not find.
    """
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host(environ) else "0"
