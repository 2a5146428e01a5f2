"""Judges whether a row of the league holds, from what its ranks found. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from train_cli.league.row import LeagueRow
from train_cli.verify.findings import Kind, Limits, RankFindings, differences, in_words, worst

SHOWN: tuple[Kind, ...] = ("loss", "gradient norm", "gradient", "weight")
"""The kinds that the table has a column for. First values must be equal bit for bit, and are told only where they are not; a
held-out loss counts as a loss."""


@dataclass(frozen=True)
class Result:
    """Holds the largest relative errors of a row, over all ranks, steps and parameters.

    errors: beside one process, by kind. plain: the largest of any kind beside the plain loop; None where the row has none.
    differs: where it does not hold, the lines that say what differs first. failed: why it could not be compared.
    """

    row: LeagueRow
    errors: dict[Kind, float] = field(default_factory=dict)
    plain: float | None = None
    differs: tuple[str, ...] = ()
    failed: str = ""

    @property
    def holds(self) -> bool:
        """Whether nothing is beyond the row's limit."""
        return not self.differs and not self.failed


def judged(row: LeagueRow, alone: Sequence[RankFindings], plain: Sequence[RankFindings] | None) -> Result:
    """Returns the result of a row. alone: findings of its ranks beside one process; plain: beside the plain loop, if it has
    one.
    """
    limits = Limits(row.limit, row.limit)
    found = {one.kind: one.error for one in worst(alone, limits)}
    found["loss"] = max(found["loss"], found.get("held-out loss", 0.0))
    errors = {kind: found[kind] for kind in SHOWN if kind in found}
    beside_plain = None if plain is None else max(one.error for one in worst(plain, limits))
    return Result(row, errors, beside_plain, tuple(_differs(row, alone, plain or (), limits)))


def _differs(row: LeagueRow, alone: Sequence[RankFindings], plain: Sequence[RankFindings], limits: Limits) -> list[str]:
    """Returns what differs first from one process, or else from the plain loop; nothing where the row holds."""
    for what, found in (("one process", alone), ("the plain loop", plain)):
        if differences(found, limits):
            lines = list(in_words(found, limits, row.num_steps))
            return [f"beside {what} it {lines[0]}", *lines[1 : lines.index("")]]
    return []
