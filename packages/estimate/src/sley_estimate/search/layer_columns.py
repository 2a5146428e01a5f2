"""Holds what every layer of a model takes in a layout: seconds of its actions and bytes, as arrays over the layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sley_estimate.seconds.layer_seconds import LayerSeconds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class LayerColumns:
    """One entry per layer of the model. Seconds: of a micro-batch, exchanges of its weights included. Bytes: `kept`, of what
    waits for the backward; `output`, of what is handed on; `passing`, of what the backward has beside what waited.
    is_measured: whether the seconds rest on the machine file's. host_s: of the host to start a micro-batch there
    and back, [2, layers]: whole, and in two halves.
    """

    forward: Floats
    backward: Floats
    input_gradient: Floats
    weight_gradient: Floats
    kept: Integers
    output: Integers
    passing: Integers
    is_measured: NDArray[np.bool_]
    host_s: Floats

    @cached_property
    def has_host(self) -> bool:
        """Returns whether it is known of a layer what the host takes to start it."""
        return bool(self.host_s.any())

    @cached_property
    def least_back(self) -> Floats:
        """Returns each layer's seconds of the cheaper way to go back: whole, or in two halves."""
        return np.minimum(self.backward, self.input_gradient + self.weight_gradient)

    @cached_property
    def rows(self) -> Floats:
        """Returns [4, layers + 1], with a zero behind the last layer: seconds of a layer's forward, until its input's gradient
        is there, and of its cheaper way back; kept bytes.
        """
        through = np.minimum(self.backward, self.input_gradient)
        return np.array([np.append(one, 0.0) for one in (self.forward, through, self.least_back, self.kept)])

    @cached_property
    def totals(self) -> tuple[float, float, int]:
        """Returns the sums over all layers: seconds of forwards, seconds of the cheaper ways back, kept bytes."""
        return float(self.forward.sum()), float(self.least_back.sum()), int(self.kept.sum())

    @cached_property
    def layers(self) -> list[LayerSeconds]:
        """Returns the seconds of each layer as one object."""
        each = self.forward, self.backward, self.input_gradient, self.weight_gradient
        return [LayerSeconds(*values) for values in zip(*(values.tolist() for values in each), strict=True)]
