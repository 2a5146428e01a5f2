"""A row of the league: a silent error of the field as a small plan, and what it is compared with. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, changed

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

ONE_PROCESS: Tables = {
    "parallel": {"dp": 1},
    "gradient_handlers": [],
    **dict.fromkeys(("pipeline", "weights", "sequence", "activations", "offload")),
}
"""The changes that leave a row's plan without its layout."""

LIMIT = 1e-6
"""The relative error that a row in fp32 may have: of losses, norms, gradients and weights alike, in every step."""


@dataclass(frozen=True)
class LeagueRow:
    """Describes one silent error. The row holds if no number of its layout is further than `limit` from each of its references.

    elsewhere: what goes wrong in other programs, without an error. seen: public threads about it. tables: of the plan.
    layouts: what each layout changes in them, as `changed` takes it: from the second on, each resumes from the checkpoint of
    the one before. alone: what the one-process reference changes beyond having no layout. steps: of each layout. plain: whether
    a plain loop is a reference too. moves: whether all that a run can move leaves the device between two steps.
    """

    name: str
    elsewhere: str
    seen: tuple[str, ...]
    tables: Tables
    layouts: tuple[Tables, ...]
    alone: Tables = field(default_factory=dict)
    steps: int = 3
    limit: float = LIMIT
    plain: bool = True
    moves: bool = False

    @property
    def num_steps(self) -> int:
        """The steps of all layouts together."""
        return self.steps * len(self.layouts)

    @property
    def num_ranks(self) -> int:
        """The ranks of every layout; a row whose layouts differ in it is refused."""
        sizes = {plan.world() for plan in self.plans()}
        assert len(sizes) == 1, f"{self.name}: layouts of {sizes} ranks"
        return sizes.pop()

    def plans(self) -> list[Plan]:
        """Returns the plan of each layout. Raises SleyError for what the plan's checks find, such as a missing plugin."""
        return [self._plan(layout) for layout in self.layouts]

    def plan_alone(self) -> Plan:
        """Returns the plan of one process that computes the same."""
        return self._plan({**self.layouts[0], **ONE_PROCESS, **self.alone})

    @property
    def layout(self) -> str:
        """The layouts in words: axes, then the records that make them; an arrow where a run goes on in another one."""
        words = [_in_words(changed(self.tables, **layout)) for layout in self.layouts]
        if len(words) > 3 and words == words[:2] * (len(words) // 2):
            return f"{words[0]} ⇄ {words[1]}, {len(words) - 1} times"
        return " → ".join(words)

    def _plan(self, changes: Tables) -> Plan:
        tables = changed(self.tables, **changes)
        return plan_from_dict(changed(tables, run__steps=self.num_steps, run__name=self.name))


def _in_words(tables: Tables) -> str:
    """Returns `dp 2 x wp 2, pp.one_f_one_b, dp.bucketed`; of one rank, how many micro-batches it has."""
    parallel = tables.get("parallel", {})
    sizes = [f"{axis} {parallel[axis]}" for axis in ("dp", "sp", "wp", "pp") if parallel.get(axis, 1) > 1]
    batch = tables["batch"]
    axes = " x ".join(sizes) or f"{batch['global_size'] // batch['micro_size']} micro-batches"
    listed = [*tables.get("gradient_handlers", []), *tables.get("offload", [])]
    single = [tables[key] for key in ("pipeline", "activations") if key in tables]
    return ", ".join([axes, *(_name(one) for one in (*single, *listed))])


def _name(table: dict[str, Any]) -> str:
    name: str = table["use"]
    return name


def by_ranks(rows: Sequence[LeagueRow]) -> dict[int, list[LeagueRow]]:
    """Returns the rows of each number of ranks, fewest ranks first."""
    found: dict[int, list[LeagueRow]] = {}
    for row in sorted(rows, key=lambda row: row.num_ranks):
        found.setdefault(row.num_ranks, []).append(row)
    return found
