"""Numbers that plugins add to a step's row: every rank gives its share, and one sum over all ranks makes the number.

attach: add("norms/embedding", ...) ──> agree: names of all ranks ──> step: own shares ──> summed with loss and norm ──> row
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sley_core.comm.collectives import gather_objects
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.groups import Groups
    from sley_core.engine.book import Entry

Share = Callable[[], "Tensor | float"]
Of = Literal["sum", "root"]


class StepNumbers:
    """Collects the numbers that plugins add to the rows of a run.

    names: the numbers of all ranks, in one order on all of them, once they have agreed.
    """

    def __init__(self, groups: Groups) -> None:
        self.names: tuple[str, ...] = ()
        self._groups = groups
        self._shares: dict[str, Share] = {}
        self._kinds: dict[str, Of] = {}
        self._is_agreed = False

    def add(self, name: str, share: Share, of: Of = "sum") -> None:
        """Adds a number to every row from the first step on; called while plugins are attached, on any of the ranks.

        name: with a slash, `plugin/number`, so that it differs from core's. share: returns this rank's part of the number, a
        float or a scalar on the device; called once per step, when gradients are reduced, unscaled and not yet clipped. Ranks
        that have not added the name contribute 0. of: the row gets the "sum" over all ranks or the square "root" of it.

        Raises RunError `number-name` for a name that is taken or has no slash, and `number-late` once ranks have agreed.
        """
        if self._is_agreed:
            raise RunError(
                "number-late", f"the number {name!r} comes after plugins are attached", hint="add it in `attach`"
            )
        if "/" not in name or name in self._shares:
            why = "is there already" if name in self._shares else "has no slash"
            raise RunError("number-name", f"the number {name!r} {why}", hint="name it `plugin/number`")
        self._shares[name] = share
        self._kinds[name] = of

    def fraction(self, entry: Entry) -> float:
        """Returns the factor for a share summed over `entry`'s elements, so that the sum over all ranks counts each element
        once.

        Ranks of its reduce group hold the same gradient, and so do the stages of a tie.
        """
        return 1.0 / (self._groups[entry.reduce_group].size * len(entry.stages))

    def agree(self) -> None:
        """Merges the numbers of all ranks into one list, the same on all; a blocking collective over all ranks of the world.

        Raises RunError `number-name` on all ranks if one name is a sum on one rank and a root on another.
        """
        self._is_agreed = True
        found: dict[str, Of] = {}
        for kinds in gather_objects(self._kinds, self._groups["control"], what="the numbers that plugins add to rows"):
            for name, kind in kinds.items():
                if found.setdefault(name, kind) != kind:
                    raise RunError("number-name", f"the number {name!r} is a sum on one rank and a root on another")
        self._kinds = dict(sorted(found.items()))
        self.names = tuple(self._kinds)

    def own(self, device: torch.device) -> Tensor:
        """Returns this rank's shares, float64 [numbers] on `device`; 0 for names that this rank did not add."""
        shares = [self._shares[name]() if name in self._shares else 0.0 for name in self.names]
        values = torch.zeros(len(shares), dtype=torch.float64)
        on_device: dict[int, Tensor] = {}
        for at, share in enumerate(shares):
            if isinstance(share, Tensor) and share.device.type != "cpu":
                on_device[at] = share.detach()
            else:
                values[at] = float(share)
        values = values.to(device)
        for at, share in on_device.items():
            values[at] = share
        return values

    def row(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns the numbers for the row, by name, from their `sums` over all ranks."""
        numbers = zip(self._kinds.items(), sums, strict=True)
        return {name: _root(number) if of == "root" else number for (name, of), number in numbers}


def _root(number: float) -> float:
    return math.sqrt(number) if number >= 0 else math.nan
