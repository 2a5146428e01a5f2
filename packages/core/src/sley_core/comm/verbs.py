"""The kinds of exchanges that groups have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Collective = Literal["gather", "reduce", "sum", "swap"]
"""All-gather, reduce-scatter, all-reduce, all-to-all."""

Op = Literal["sum", "max", "min"]
"""What an all-reduce computes."""

Exchange = Op | Literal["broadcast", "gather", "swap", "send", "receive"]
"""An all-reduce by its operation, a broadcast, an all-gather, an all-to-all, and the two ends of a message."""


class Imitate(Protocol):
    """Takes the place of a group's exchanges where its other members do not exist."""

    def __call__(self, kind: Exchange, result: Tensor, given: Tensor, lane: str, what: str, /) -> Callable[[], None]:
        """Imitates an exchange on `lane` that gives `given` and fills `result`, which may be the same tensor.

        Returns a function to call where the rank waits for it. what: describes the exchange, for errors.
        """
