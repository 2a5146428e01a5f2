"""Where in a launcher's store ranks meet. It may have been used before: by ranks that the launcher started first, and by this
process itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them

STORE = "SLEY_STORE"
"""The environment variable in which a local launch names its file store; else `env://` is used."""

_PLACE = (STORE, "MASTER_ADDR", "MASTER_PORT", "RANK")
_counts: Counter[tuple[str | None, ...]] = Counter()


def fresh(store: Store, environ: Mapping[str, str], what: str) -> PrefixStore:
    """Returns a part of `store` that nobody has used, the same one on all ranks, if all ask equally often for `what`.

    environ: the launcher's, where it says by which store they meet.
    """
    place = (what, *(environ.get(name) for name in _PLACE))
    _counts[place] += 1
    return PrefixStore(f"attempt {_attempt(environ)}, {what} {_counts[place]}", store)


def forget() -> None:
    """Counts from the beginning, as a new process would."""
    _counts.clear()


def is_one_host(environ: Mapping[str, str]) -> bool:
    """Returns whether one agent of torchrun has started all ranks, or none: then its store outlives them."""
    return environ.get("GROUP_WORLD_SIZE", "1") == "1"


def _attempt(environ: Mapping[str, str]) -> str:
    """Returns the number of times that torchrun has started the ranks again, with the store that they had, in which gloo would
    find addresses of those that have ended. Agents of several hosts count their attempts each for itself.
    """
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host(environ) else "0"
