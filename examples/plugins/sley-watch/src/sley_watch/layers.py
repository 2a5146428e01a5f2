"""`watch.layers`: the norms of each layer's gradient and weights, in each row."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.protocols import GradientHandler
from sley_watch.config import LayersConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sley_core.api.parts import Param, Parts


class Layers(GradientHandler):
    """Adds `watch/gradient_norm/LAYER` and `watch/weight_norm/LAYER` for each layer that has trained parameters.

    The same in every layout: 2-norms in fp64 of whole gradients, not yet clipped, and of the weights that they belong to. What
    is frozen counts as 0. A weight that several layers share is that of the layer whose name it has.
    """

    def __init__(self, config: LayersConfig) -> None:
        self.config = config

    def attach(self, parts: Parts) -> None:
        self._store = parts.store
        of_layer: dict[str, list[tuple[Param, float]]] = {}
        for param in parts.registry.trainable:
            if len(param.stages) > 1:  # not every stage that holds it knows the layer after which it is named
                layer = param.name.rpartition(".")[0]
            else:
                layer = _layer_of(param.name, [one.name for one in parts.layers])
            of_layer.setdefault(layer, []).append((param, parts.numbers.fraction(param)))
        kinds: dict[str, Callable[[Param], Tensor]] = {"gradient": parts.store.gradient}
        if self.config.weights:
            kinds["weight"] = lambda param: param.parameter.detach()
        for layer, params in of_layer.items():
            for kind, tensor_of in kinds.items():
                share = partial(self._squares, params, tensor_of)
                parts.numbers.add(f"watch/{kind}_norm/{layer}", share, of="root")

    def _squares(self, params: Iterable[tuple[Param, float]], tensor_of: Callable[[Param], Tensor]) -> Tensor | float:
        """Returns this rank's share of a squared norm; padding of shards is zeros, which add nothing."""
        found = [tensor_of(param).double().square().sum() * part for param, part in params if param in self._store]
        return sum(found, start=0.0)


def _layer_of(name: str, layers: Iterable[str]) -> str:
    """Returns the layer of a parameter: the longest of `layers` that its name begins with, or the first part of its name."""
    found = [layer for layer in layers if name == layer or name.startswith(f"{layer}.")]
    return max(found, key=len, default=name.split(".")[0])
