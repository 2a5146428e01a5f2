"""Counts what a communicator does: per step, per evaluation batch, and peaks; for the end of a run and for tests.

begin ──> gathered*, dropped* ──> end: differences are those of one pass over the rank's actions
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sley_core.api.actions import Action
from sley_core.api.parts import Phase

if TYPE_CHECKING:
    from sley_core.api.comm import SentBytes
    from sley_core.protocols import MemoryPool
    from sley_isp.embedding_columns import Columns
    from sley_isp.prefetch import PrefetchPolicy
    from sley_isp.reductions import Reductions
    from sley_isp.units import Gathered, Unit

WARM_UP = 2
"""Steps after which a pool should allocate no more: in the first, the order of gathers is not known yet."""


@dataclass
class Tally:
    """Counts the exchanges and bytes of one rank. Its parts count since the beginning; bytes are those of gathers.

    sent: counts what all parts send in a step.
    """

    prefetch: PrefetchPolicy
    reductions: Reductions
    columns: Columns
    pool: MemoryPool
    sent: SentBytes
    num_steps: int = 0
    max_bytes: int = 0
    _bytes: int = 0
    _per_micro: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    _warm_allocations: int | None = None
    _units: Counter[Unit] = field(default_factory=Counter)
    _gathered_bytes: int = 0
    _num_micros: int = 1
    _phase: Phase = Phase.TRAIN

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Starts to count a step, or an evaluation, that runs `actions`."""
        self._units.clear()
        self._phase = phase
        self.sent.begin_step()
        self._num_micros = len({action.micro for action in actions}) or 1
        self._before = self.totals

    def gathered(self, unit: Unit, gathered: Gathered) -> None:
        """Counts a gather of `unit` that has started, and its buffer among the bytes resident now."""
        self._units[unit] += 1
        self._bytes += gathered.num_bytes
        self._gathered_bytes += gathered.num_received_bytes
        self.sent.add_message(gathered.num_received_bytes)  # shards are equal: each rank sends as much as it receives
        self.max_bytes = max(self.max_bytes, self._bytes)

    def dropped(self, gathered: Gathered) -> None:
        """Subtracts the buffer of a gather from the bytes resident now."""
        self._bytes -= gathered.num_bytes

    def end(self) -> None:
        """Ends the count that `begin` started: notes gathers per unit and micro-batch, and after a training step the
        differences of all totals.
        """
        self._per_micro[self._phase] = max(self._units.values(), default=0) / self._num_micros
        if self._phase is not Phase.TRAIN:
            return
        self.num_steps += 1
        self.sent.end_step()
        self._last = {name: now - self._before[name] for name, now in self.totals.items()}
        if self.num_steps == WARM_UP:
            self._warm_allocations = self.num_allocations

    @property
    def num_allocations(self) -> int:
        """Returns the number of buffers that this package's pools allocated; 0 for another plugin's pool."""
        return int(getattr(self.pool, "num_allocations", 0))

    @property
    def totals(self) -> dict[str, int]:
        """Returns totals since the beginning, by name: gathers, those not prefetched, gradient exchanges, bytes received by
        gathers and sent by reductions, allocations.

        With tables cut by columns also the exchanges of vectors, and the bytes received by them and as token ids.
        """
        swaps = {"embedding_swaps": self.columns.num_exchanges, "embedding_bytes": self.columns.num_bytes}
        return {
            "gathers": self.prefetch.num_gathers,
            "demand_gathers": self.prefetch.num_demands,
            "reductions": self.reductions.num_started,
            "gathered_bytes": self._gathered_bytes,
            "reduced_bytes": self.reductions.num_bytes,
            "allocations": self.num_allocations,
            **(swaps if self.columns.tables else {}),
        }

    @property
    def peaks(self) -> dict[str, int]:
        """Returns peaks at one time, by name: gathered units and their bytes, full-size gradients, and bytes
        leased for them.
        """
        return {
            "resident_units": self.prefetch.max_held,
            "resident_bytes": self.max_bytes,
            "full_gradients": self.reductions.max_live,
            "full_gradient_bytes": self.reductions.max_live_bytes,
        }

    def report(self) -> dict[str, Any]:
        """Returns what weights were gathered and sent: by name, the last step's numbers (`..._per_step`), gathers of a unit per
        micro-batch in training and evaluation, peaks of all steps (`most_...`), and allocations of memory after warm-up.
        """
        last = {name: value for name, value in self._last.items() if name != "allocations"}
        found: dict[str, Any] = {"gathers_per_unit_and_micro_batch": self._per_micro.get(Phase.TRAIN, 0)}
        if Phase.EVALUATE in self._per_micro:
            found["gathers_per_unit_and_micro_batch_evaluating"] = self._per_micro[Phase.EVALUATE]
        found |= {f"{name}_per_step": value for name, value in last.items()} | self.sent.counts()
        found |= {f"most_{name}": value for name, value in self.peaks.items()}
        if self._warm_allocations is not None:
            found[f"allocations_after_step_{WARM_UP}"] = self.num_allocations - self._warm_allocations
        return found
