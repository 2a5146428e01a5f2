"""Counts the trained parameters of layers, some of which may be tied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch.nn import Parameter

if TYPE_CHECKING:
    from sley_core.model.layers import Layer
    from sley_core.search.layouts import Shape


class Trained:
    """Holds the trained parameters of a model's layers. every: those of each layer.

    Of whole weights on one stage, tied ones are there once, and count with the first layer that has them.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.every = [[one for one in layer.module.parameters() if one.requires_grad] for layer in layers]
        self._once = _first_uses(self.every)
        self._numel, self._numel_once = num_elements(self.every), num_elements(self._once)

    def held(self, shape: Shape) -> list[list[Parameter]]:
        """Returns the parameters that count with each layer in a shape."""
        return self._once if _is_once(shape) else self.every

    def numel(self, shape: Shape) -> NDArray[np.int64]:
        """Returns how many elements these have, [layers]; must not be modified."""
        return self._numel_once if _is_once(shape) else self._numel


def num_elements(layers: Sequence[Sequence[Parameter]]) -> NDArray[np.int64]:
    """Returns how many elements the parameters of each layer have together, [layers]."""
    return np.array([sum(one.numel() for one in some) for some in layers], dtype=np.int64)


def _is_once(shape: Shape) -> bool:
    return shape.sizes.pp == 1 and shape.weights is None


def _first_uses(layers: Sequence[Sequence[Parameter]]) -> list[list[Parameter]]:
    """Returns the parameters of each layer without those that a layer before it has, too."""
    seen: set[int] = set()
    found = []
    for some in layers:
        found.append([one for one in some if id(one) not in seen])
        seen.update(map(id, some))
    return found
