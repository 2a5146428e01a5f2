"""Finds from a plan what the update of one element depends on, without importing the optimizer.

A layout that gives a rank only a part of each matrix, or of the model, would change the result if an update looks
further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sley_core.optim.config import FactoryOptimizerConfig
from sley_core.records import OptimizerRecord

if TYPE_CHECKING:
    from sley_core.plan.plan import Component
    from sley_core.records import Scope

ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""torch.optim's classes of which an element's update takes nothing but its own gradient, its own states and the step."""

PER_MATRIX = frozenset({"Adafactor", "Muon"})
"""Those that look at rows, columns or a root mean square of a whole parameter."""


def scope_of(optimizer: Component) -> Scope | Literal["unknown"]:
    """Returns the scope that the record or the factory's table declares; else that of torch.optim's own classes.

    "unknown" for another class without a declaration.
    """
    if isinstance(optimizer.record, OptimizerRecord):
        return optimizer.record.scope
    config = optimizer.config
    assert isinstance(config, FactoryOptimizerConfig), config
    if config.scope is not None:
        return "per_matrix" if config.scope == "matrix" else config.scope
    module, _, name = config.factory.partition(":")
    if module != "torch.optim" and not module.startswith("torch.optim."):
        return "unknown"
    return "elementwise" if name in ELEMENTWISE else "per_matrix" if name in PER_MATRIX else "unknown"
