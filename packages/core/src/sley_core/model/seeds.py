"""Derives seeds for everything random in a run: each use has a name, and equal names give equal seeds in every process."""

from __future__ import annotations

from hashlib import sha256


def derive(seed: int, *parts: int | str) -> int:
    """Returns a seed in [0, 2**63) that depends on `seed` and on every part, its type and position; the same in every version.

    SHA-256 of the parts, each with its type and length, so that ("ab", "c") and ("a", "bc"), and 1 and "1", differ. Python's
    own `hash` is salted per process.
    """
    digest = sha256()
    for part in (seed, *parts):
        text = str(part).encode()
        digest.update(b"%c%d:%b" % (b"s" if isinstance(part, str) else b"i", len(text), text))
    return int.from_bytes(digest.digest()[:8], "big") >> 1
