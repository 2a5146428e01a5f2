"""Says where a part of a run's memory is, and what moving it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Literal, get_args

from sley_core.errors import StateError

Part = Literal["weights", "buffers", "masters", "optimizer_states", "gradients", "handlers", "pools", "messages"]
"""A kind of memory that a run holds between steps.

weights: parameters, shards where `wp` cuts them. buffers: of modules. masters: fp32 copies that are stepped. handlers: what
gradient handlers keep, such as PowerSGD's errors. pools: their buffers, most of which nobody has between steps. messages:
buffers of stage links and of handlers, for what is on its way.
"""

PARTS: tuple[Part, ...] = get_args(Part)

COPIED: tuple[Part, ...] = ("weights", "buffers", "masters", "optimizer_states", "handlers")
"""What an offload keeps on the host; the others are freed."""


class Where(Enum):
    """A part's state.

    HERE ── offload ──> LEAVING ── copies done ──> AWAY ── onload ──> COMING ── copies done ──> HERE
    """

    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"


def is_away(part: str, what: str) -> StateError:
    """Returns the StateError `memory-away`. what: what was asked, as "a step"."""
    return StateError(
        "memory-away",
        f"{what} needs the run's {part.replace('_', ' ')}, which are away",
        hint=f'call `run.memory.onload("{part}")` first, or `run.memory.onload()` for everything',
    )


@dataclass
class Moved:
    """What moving a part has cost since the run began.

    copied_out, copied_in: bytes of copies. gathered: bytes that came back from other ranks' hosts. given_back: bytes of
    device memory that the last offload freed.
    seconds_out, seconds_in: until the copies were done, of those whose end the host has seen (it waited, or asked where they
    are); timed_out, timed_in: their bytes. host_bytes: what the part takes on the host. num_no_ops: calls that found it where
    they wanted it.
    """

    copied_out: int = 0
    copied_in: int = 0
    gathered: int = 0
    given_back: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    timed_out: int = 0
    timed_in: int = 0
    host_bytes: int = 0
    num_no_ops: int = 0

    def numbers(self) -> dict[str, float]:
        """Returns the numbers for a report, by name; with `gb_per_s_out` and `gb_per_s_in` (0 where no seconds are known) in
        place of the bytes that were timed.
        """
        found: dict[str, float] = asdict(self)
        for way in ("out", "in"):
            timed, seconds = found.pop(f"timed_{way}"), found[f"seconds_{way}"]
            found[f"gb_per_s_{way}"] = timed / 1e9 / seconds if seconds else 0.0
        return found
