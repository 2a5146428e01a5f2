"""Holds the work of a layer as plain numbers: what each operator multiplies and moves, in each phase. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

PhaseName = Literal["forward", "recompute", "backward", "input_gradient", "weight_gradient"]
"""When an operator runs. A whole backward is `backward`; a split one is `input_gradient`, later `weight_gradient`; in front of
either comes `recompute`, where the activation policy runs the layer again."""


@dataclass(frozen=True)
class Operator:
    """One kernel. num_bytes: of its inputs and outputs, each once. flops: of a product of `dtype`, 0 for any other operator.

    is_on_host: whether it works on memory of the host, which its cores do, and not the device.
    """

    name: str
    num_bytes: int
    flops: int = 0
    dtype: str = ""
    is_on_host: bool = False


@dataclass(frozen=True)
class LayerWork:
    """The operators of one layer and one micro-batch, by phase, in the order in which they run.

    num_parameters: elements that are trained. output_bytes: of what the layer hands on. kept_bytes: of what waits for the
    backward. passing_bytes: the most that its backward has at once beyond what waited for it, the gradient that it begins from
    included.
    """

    forward: tuple[Operator, ...]
    recompute: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    input_gradient: tuple[Operator, ...]
    weight_gradient: tuple[Operator, ...]
    num_parameters: int
    output_bytes: int
    kept_bytes: int
    passing_bytes: int = 0

    def of(self, phase: PhaseName) -> tuple[Operator, ...]:
        """Returns the operators of one phase, in the order in which they run."""
        found: tuple[Operator, ...] = getattr(self, phase)
        return found


PHASES: tuple[PhaseName, ...] = ("forward", "recompute", "backward", "input_gradient", "weight_gradient")
assert set(PHASES) <= {field.name for field in fields(LayerWork)}
