"""Computes how much longer a rank works at a place than comparable ranks or layers do, which may make others wait.

Likes, by the place:

* work of a chunk, update, reduction: the ranks of the same stage, which do the same work on other samples, or with other shards
* where a stage has one rank: layers of the same kind and sizes anywhere, and for the update elements that are stepped
* data, what comes between steps, evaluations: all other ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sley_doctor.reports.work_record import BETWEEN, DATA, DEVICE, EVALUATION, MESSAGES, NOTHING, UPDATE, Spread
from sley_doctor.slow.blocks import Block, RankWork, middle

MOST_RATIO = 1.5
"""Likes take this much longer than each other and nobody is slow."""

MOST_FAR_RATIO = 3.0
"""As much where they are not quite alike: layers that other layers precede, weights of other shapes, other neighbours."""

_EVERYONES = frozenset({DATA, BETWEEN, EVALUATION})
"""Places where all ranks do the like."""

_OF_CHUNKS = "FBDW"
"""How places begin where layers work."""


class Excess(NamedTuple):
    """Seconds of a step beyond what comparable work takes. usual_s: what that takes. layer: "" if no single layer stands
    out.
    """

    place: str
    layer: str
    seconds: float
    usual_s: float


def excesses(block: Block, rank: int) -> list[Excess]:
    """Returns where `rank` works longer than comparable ranks or layers, the largest excess first."""
    own, others = block.ranks[rank], [one for number, one in block.ranks.items() if number != rank]
    peers = [one for one in others if one.start.stage == own.start.stage]
    found = (_excess(own, peers, others, place, block) for place in own.work if place != DEVICE)
    return sorted((one for one in found if one is not None), key=lambda one: -one.seconds)


def _excess(own: RankWork, peers: list[RankWork], others: list[RankWork], place: str, block: Block) -> Excess | None:
    """Returns by how much a rank's time at `place` exceeds that of comparable ranks or chunks; None if it does not."""
    spent = own.work[place]
    if peers or place in _EVERYONES:
        likes = others if place in _EVERYONES else peers
        usual = _usual(one.work.get(place, NOTHING) for one in likes)
        if not likes or not _is_apart(spent, usual, MOST_RATIO):
            return None
        layer = _layer_beyond(own, peers, place, spent.middle - usual.middle)
        return Excess(place, layer, spent.middle - usual.middle, usual.middle)
    if place[0] in _OF_CHUNKS and place in own.layers:
        return max(_beyond_alike(own, place, block), key=lambda one: one.seconds, default=None)
    if place in (UPDATE, MESSAGES) and others:
        usual = _usual(_scaled(one, own, place) for one in others)
        if _is_apart(spent, usual, MOST_FAR_RATIO):
            return Excess(place, "", spent.middle - usual.middle, usual.middle)
    return None


def _scaled(like: RankWork, own: RankWork, place: str) -> Spread:
    """Returns the time of `like`, scaled up to the number of elements that `own` steps where `like` steps fewer."""
    spent = like.work.get(place, NOTHING)
    factor = max(1.0, own.start.trained / max(1, like.start.trained)) if place == UPDATE else 1.0
    return Spread(*(value * factor for value in spent))


def _layer_beyond(own: RankWork, peers: list[RankWork], place: str, seconds: float) -> str:
    """Returns the layer in which most of an excess arises; "" if there is none."""
    found = {
        layer: spent.middle - _usual(peer.layers.get(place, {}).get(layer, NOTHING) for peer in peers).middle
        for layer, spent in own.layers.get(place, {}).items()
    }
    most = max(found, key=lambda layer: found[layer], default="")
    return most if peers and most and found[most] >= seconds / 2 else ""


def _beyond_alike(own: RankWork, place: str, block: Block) -> Iterator[Excess]:
    """Yields layers that take longer than layers of the same kind, sizes and direction do on any rank."""
    for layer, spent in own.layers[place].items():
        likeness = own.start.layers.get(layer)
        alike = [
            one
            for rank in block.ranks.values()
            for other, one in _of_direction(rank, place[0]).items()
            if likeness is not None and other != layer and rank.start.layers.get(other) == likeness
        ]
        usual = _usual(alike)
        if alike and _is_apart(spent, usual, MOST_FAR_RATIO):
            yield Excess(place, layer, spent.middle - usual.middle, usual.middle)


def _of_direction(rank: RankWork, letter: str) -> dict[str, Spread]:
    return {layer: one for place, some in rank.layers.items() if place[0] == letter for layer, one in some.items()}


def _usual(likes: Iterable[Spread]) -> Spread:
    """Returns the median of each quartile over `likes`."""
    some = list(likes)
    return Spread(*(middle(one[place] for one in some) for place in range(3)))


def _is_apart(spent: Spread, usual: Spread, ratio: float) -> bool:
    """Returns whether `spent` exceeds `usual` by `ratio`, and by more than steps vary: three in four of its steps take longer
    than half of the likes', half of its steps longer than three in four of theirs.
    """
    return spent.middle > max(ratio * usual.middle, usual.high) and spent.low > usual.middle
