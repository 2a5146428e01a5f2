"""Buckets of weight gradients: which are reduced together (a layer's or one module's), and which contributions each still
lacks.

contribution ──> open, full size ──> contribution* ──> sent: each place that contributes has had its backward, and another
                                                        is next (or the action that may complete it ends)

A place is a unit, or a module if each module has a bucket. The modules of a unit that have contributed do not show whether
others will: that may depend on the data, which differ between ranks, and all ranks must send in one order.
"""

from __future__ import annotations

from collections.abc import Container, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.parts import Entry
    from sley_isp.sites import Site


@dataclass(eq=False)
class GradientBucket:
    """Names entries whose gradients are reduced in one exchange.

    number: counts buckets in the order of their layers. name: of the layer or module. layer: the first one. sources: pairs of a
    place and the entry to which its backward adds. chunks: those of all of its entries, if it is reduced once per step.
    """

    number: int
    name: str
    layer: str
    chunks: frozenset[int]
    entries: list[Entry] = field(default_factory=list)
    sources: set[tuple[Hashable, Entry]] = field(default_factory=set)


@dataclass(eq=False)
class Open:
    """Holds a bucket being filled. wholes: full gradients, padded. written: entries whose memory holds a gradient already."""

    bucket: GradientBucket
    wholes: dict[Entry, Tensor]
    lease: ExitStack
    written: set[Entry] = field(default_factory=set)

    def is_complete(self, places: Container[Hashable]) -> bool:
        """Returns whether every place that adds to a trained entry is among `places`, those of the current action so far."""
        return all(place in places for place, entry in self.bucket.sources if entry in self.wholes)


class GradientBuckets:
    """Assigns the entries of sites to buckets.

    fused: one bucket per unit, else one per site. once: each entry is in one bucket only, however many sites hold it,
    so that it can be reduced once; otherwise a tied weight's gradient is sent from each place where it is used.
    """

    def __init__(self, *, fused: bool, once: bool) -> None:
        self.fused = fused
        self.once = once
        self._parcels: dict[Hashable, GradientBucket] = {}
        self._homes: dict[Entry, Site] = {}

    def add(self, site: Site) -> None:
        """Registers `site` as a contributor to all of its entries; called for all sites before the first `of`."""
        for entry in site.entries:
            home = self._homes.setdefault(entry, site) if self.once else site
            name = home.unit.name if self.fused else home.name
            bucket = self._parcels.setdefault(
                self._key(home, entry), GradientBucket(len(self._parcels), name, home.unit.layer, entry.chunks)
            )
            if entry not in bucket.entries:
                bucket.entries.append(entry)
            bucket.sources.add((self._place(site), entry))

    def of(self, site: Site, entry: Entry) -> tuple[GradientBucket, Hashable]:
        """Returns the bucket of the gradient of `entry` from `site`, and the part of a backward in which it comes.

        That is the backward of the site's unit, or of the site alone.
        """
        return self._parcels[self._key(self._homes[entry] if self.once else site, entry)], self._place(site)

    def _place(self, site: Site) -> Hashable:
        return site.unit if self.fused else site

    def _key(self, home: Site, entry: Entry) -> Hashable:
        return (self._place(home), entry.chunks if self.once else None)
