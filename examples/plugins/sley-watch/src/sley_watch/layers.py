"""`watch.layers`: the norms of each layer's gradient and weights, in each row."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.protocols import GradientHandler
from sley_watch.config import LayersConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sley_core.api.parts import Entry, Parts


class Layers(GradientHandler):
    """Adds `watch/gradient_norm/LAYER` and `watch/weight_norm/LAYER` for each layer that has trained parameters.

    The same in every layout: 2-norms in fp64 of whole gradients, not yet clipped, and of the weights that they belong to. What
    is frozen counts as 0. A weight that several layers share is that of the layer whose name it has.
    """

    def __init__(self, config: LayersConfig) -> None:
        self.config = config

    def attach(self, parts: Parts) -> None:
        self._store = parts.store
        of_layer: dict[str, list[tuple[Entry, float]]] = {}
        for entry in parts.book.trainable:
            if len(entry.stages) > 1:  # not every stage that holds it knows the layer after which it is named
                layer = entry.name.rpartition(".")[0]
            else:
                layer = _layer_of(entry.name, [one.name for one in parts.layers])
            of_layer.setdefault(layer, []).append((entry, parts.numbers.fraction(entry)))
        kinds: dict[str, Callable[[Entry], Tensor]] = {"gradient": parts.store.gradient}
        if self.config.weights:
            kinds["weight"] = lambda entry: entry.parameter.detach()
        for layer, entries in of_layer.items():
            for kind, tensor_of in kinds.items():
                share = partial(self._squares, entries, tensor_of)
                parts.numbers.add(f"watch/{kind}_norm/{layer}", share, of="root")

    def _squares(self, entries: Iterable[tuple[Entry, float]], tensor_of: Callable[[Entry], Tensor]) -> Tensor | float:
        """Returns this rank's share of a squared norm; padding of shards is zeros, which add nothing."""
        found = [tensor_of(entry).double().square().sum() * part for entry, part in entries if entry in self._store]
        return sum(found, start=0.0)


def _layer_of(name: str, layers: Iterable[str]) -> str:
    """Returns the layer of a parameter: the longest of `layers` that its name begins with, or the first part of its name."""
    found = [layer for layer in layers if name == layer or name.startswith(f"{layer}.")]
    return max(found, key=len, default=name.split(".")[0])
