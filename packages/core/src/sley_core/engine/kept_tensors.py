"""Remembers the tensors of a module while others stand in their places."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class KeptTensors:
    """Remembers the parameters and buffers of a module, to put them back (`put_back`)."""

    def __init__(self, module: nn.Module) -> None:
        self._found: Sequence[tuple[nn.Module, str, Tensor]] = [
            (each, name, tensor)
            for each in module.modules()
            for named in (each.named_parameters, each.named_buffers)
            for name, tensor in named(recurse=False, remove_duplicate=False)
        ]

    def put_back(self) -> None:
        for module, name, tensor in self._found:
            setattr(module, name, tensor)
