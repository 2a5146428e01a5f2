"""Damages the content of files."""

from __future__ import annotations

from random import Random


def damaged(content: bytes, random: Random) -> bytes:
    """Cuts the content, flips a bit, puts in others, or repeats a part."""
    place = random.randrange(len(content))
    kind = random.randrange(5)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
    if kind == 2:
        return content[:place] + random.choice([b"\0", b"\r", b"\xff\xfe", b"[" * 3000, b'"']) + content[place:]
    if kind == 3:
        return content[:place] + content[place // 2 :]
    return content[place:]
