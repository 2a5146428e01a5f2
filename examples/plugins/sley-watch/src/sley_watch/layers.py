"""`watch.layers`: adds the norms of the gradient and weights of each layer to each row."""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from sley_core.api.parts import Param, Parts
from sley_core.protocols import GradientHandler
from sley_watch.plugin import LayersConfig


class Layers(GradientHandler):
    """Adds `watch/gradient_norm/LAYER` and `watch/weight_norm/LAYER` for each layer with trained parameters.

    The numbers are equal in every layout: fp64 2-norms of full gradients before clipping, and of full weights. Frozen
    parameters count as 0. A weight that several layers share belongs to the layer in its name.
    """

    def __init__(self, config: LayersConfig) -> None:
        self.config = config

    def attach(self, parts: Parts) -> None:
        self._store = parts.store
        params_by_layer: dict[str, list[tuple[Param, float]]] = {}
        for param in parts.registry.trainable:
            if len(param.stages) > 1:  # a stage may not have the layer in the name of a tied parameter
                layer = param.name.rpartition(".")[0]
            else:
                layer = _layer_of(param.name, [known_layer.name for known_layer in parts.layers])
            params_by_layer.setdefault(layer, []).append((param, parts.numbers.replica_weight(param)))
        sources: dict[str, Callable[[Param], Tensor]] = {"gradient": parts.store.gradient}
        if self.config.weights:
            sources["weight"] = lambda param: param.parameter.detach()
        for layer, params in params_by_layer.items():
            for label, get_tensor in sources.items():
                share = partial(self._squares, params, get_tensor)
                parts.numbers.add(f"watch/{label}_norm/{layer}", share, of="root")

    def _squares(self, params: Iterable[tuple[Param, float]], get_tensor: Callable[[Param], Tensor]) -> Tensor | float:
        """Returns this rank's share of a squared norm. params: parameters and their factors. The padding of shards is zero."""
        squares = [get_tensor(param).double().square().sum() * weight for param, weight in params if param in self._store]
        return sum(squares, start=0.0)


def _layer_of(name: str, layers: Iterable[str]) -> str:
    """Returns the layer of a parameter: the longest prefix of its name in `layers`, or the first part of its name."""
    matches = [layer for layer in layers if name == layer or name.startswith(f"{layer}.")]
    return max(matches, key=len, default=name.split(".")[0])
