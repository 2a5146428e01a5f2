"""Publishes this rank's shards in a step, together with all ranks of `wp`, for peers to read until everybody has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sley_core.api.comm import GATHER

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Published, Transport
    from sley_isp.units import Gathered, Unit


class PublishedShards:
    """Holds the shards that are published in a step, and the gathers that have not ended for the peers.

    is_due: returns whether something must still be waited for before a layer's weights are used. leaving: gathered weights that
    are no longer used, whose peers may still be receiving this rank's shards.
    """

    def __init__(self, group: Group, is_due: Callable[[str], bool]) -> None:
        self.leaving: list[Gathered] = []
        self._group = group
        self._is_due = is_due
        self._published: Published | None = None
        self._stamps: dict[Unit, int] = {}

    def begin(self, units: Sequence[Unit]) -> None:
        """Publishes the shards without a pending wait; the others are sent at each gather."""
        still = [unit for unit in units if not self._is_due(unit.layer)]
        self._stamps = {unit: unit.stamp for unit in still}
        if not still:
            return
        due = ", ".join(unit.name for unit in units if unit not in self._stamps)
        # A collective over `wp`, before the first gather of a step or an evaluation, which all its ranks begin together.
        what = f"the weights but for {due}" if due else "the weights"
        shards = [shard for unit in still for shard in unit.shards]
        self._published = self._group.transport(GATHER).publish(shards, what=what)

    def source(self, unit: Unit) -> Transport | Published:
        """Returns the published shards if they are still as published, else the transport; the same on all ranks of `wp`."""
        if self._published is not None and self._stamps.get(unit) == unit.stamp:
            return self._published
        return self._group.transport(GATHER)

    def end(self) -> None:
        """Waits until all peers have this rank's shards, which may change from now on."""
        for gathered in self.leaving:
            gathered.wait_sent()
        self.leaving.clear()
        if self._published is not None:
            self._published.wait_sent()
            self._published = None

    def forget(self) -> None:
        """Drops what a failed step has published: it would keep a communicator, whose threads must end with the run."""
        self._published = None
