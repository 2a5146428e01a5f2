"""Gives layers tensors without values, for a fake world whose tensors have only shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sley_core.model.formats import buffer_format
from sley_core.model.layers import like

if TYPE_CHECKING:
    from sley_core.model.layers import Layer


def imagine(layers: Iterable[Layer], *, dtype: torch.dtype, device: torch.device) -> None:
    """Replaces the parameters of `layers`, on meta, and their buffers by new tensors on `device`, of the dtypes that
    `materialize` gives them; shared tensors stay shared. Called in a fake world, where new tensors have no values.

    Of other tensors that layers hold, those on meta move to `device` in place.
    """
    # By id of the old tensor, which is kept too, so that its id is not reused.
    parameters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in layers:
        for module in layer.module.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) not in parameters:
                    new = torch.empty(parameter.shape, dtype=dtype, device=device)
                    parameters[id(parameter)] = parameter, like(parameter, new)
                setattr(module, name, parameters[id(parameter)][1])
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if id(buffer) not in buffers:
                    new = torch.empty_like(buffer, dtype=buffer_format(buffer, dtype), device=device)
                    buffers[id(buffer)] = buffer, new
                setattr(module, name, buffers[id(buffer)][1])
        for held in layer.held:
            if held.ref is not None and held.tensor.is_meta:
                value = torch.empty_like(held.tensor, device=device)
                same = like(held.tensor, value) if isinstance(held.tensor, nn.Parameter) else value
                torch.utils.swap_tensors(held.tensor, same)  # type: ignore[no-untyped-call]  # torch's
