"""Counts the trained parameters of layers, some of which may be tied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch.nn import Parameter


def first_uses(layers: Sequence[Sequence[Parameter]]) -> list[list[Parameter]]:
    """Returns the parameters of each layer without those that a layer before it has, too."""
    seen: set[int] = set()
    found = []
    for some in layers:
        found.append([one for one in some if id(one) not in seen])
        seen.update(map(id, some))
    return found


def num_elements(layers: Sequence[Sequence[Parameter]]) -> NDArray[np.int64]:
    """Returns how many elements the parameters of each layer have together, [layers]."""
    return np.array([sum(one.numel() for one in some) for some in layers], dtype=np.int64)
