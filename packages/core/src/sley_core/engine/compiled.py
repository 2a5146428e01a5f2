"""Compiles layers for as long as a run is open."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from sley_core.model.attention import varlen

if TYPE_CHECKING:
    from torch import nn

    from sley_core.model.layers import Layer

_KEPT = "_compiled_call_impl"
"""The attribute in which `nn.Module.compile` stores the compiled call."""


def compile_layers(layers: Iterable[Layer], undo: ExitStack) -> None:
    """Makes calls of `layers` go through torch.compile until `undo` closes, which restores each module's former call."""
    varlen()  # imported now: compiled code cannot import it
    for layer in layers:
        before = vars(layer.module).get(_KEPT)
        layer.module.compile()
        undo.callback(_put_back, layer.module, before)


def _put_back(module: nn.Module, before: object) -> None:
    if before is None:
        vars(module).pop(_KEPT, None)
    else:
        vars(module)[_KEPT] = before
