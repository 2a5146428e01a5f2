"""Counts the trained parameters of layers, some of which may be tied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch.nn import Parameter

if TYPE_CHECKING:
    from sley_core.model.layers import Layer
    from sley_estimate.search.stage_cut import ModelParts


@dataclass(frozen=True, eq=False)
class Counted:
    """Holds the trained parameters that count with each layer: each that is tied once per stage."""

    held: list[list[Parameter]]

    @cached_property
    def numel(self) -> NDArray[np.int64]:
        """Returns how many elements these have, [layers]; must not be modified."""
        return num_elements(self.held)


class Trained:
    """Holds the trained parameters of a model's layers. every: those of each layer."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.every = [[one for one in layer.module.parameters() if one.requires_grad] for layer in layers]
        uses = Counter(id(one) for some in self.every for one in some)
        self._tied = [at for at, some in enumerate(self.every) if any(uses[id(one)] > 1 for one in some)]
        self._counted: dict[tuple[int, ...], Counted] = {}

    def counted(self, parts: ModelParts | None) -> Counted:
        """Returns what counts with each layer of a model that is cut into `parts`: a tied parameter with its first layer on
        each stage that has it. None: with its first layer alone, so that no cut has less. The same object for cuts that deal
        ties alike.
        """
        stages = tuple(parts.stage_of(at) if parts else 0 for at in self._tied)
        if stages not in self._counted:
            self._counted[stages] = Counted(self._first_uses(dict(zip(self._tied, stages, strict=True))))
        return self._counted[stages]

    def _first_uses(self, stage_of: Mapping[int, int]) -> list[list[Parameter]]:
        """Returns the parameters of each layer without those that a layer before it on its stage has, too. stage_of: of each
        layer with ties.
        """
        seen: set[tuple[int, int]] = set()
        found = []
        for at, some in enumerate(self.every):
            stage = stage_of.get(at, 0)
            found.append([one for one in some if (stage, id(one)) not in seen])
            seen.update((stage, id(one)) for one in some)
        return found


def num_elements(layers: Sequence[Sequence[Parameter]]) -> NDArray[np.int64]:
    """Returns how many elements the parameters of each layer have together, [layers]."""
    return np.array([sum(one.numel() for one in some) for some in layers], dtype=np.int64)
