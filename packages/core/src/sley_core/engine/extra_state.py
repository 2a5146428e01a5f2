"""The extra state of modules (`get_extra_state`), as tensors: in files of weights and in checkpoints it has torch's name.

torch's state dict holds any object there; files hold tensors. So it is written as text, uint8 [bytes], and must be plain data:
None, numbers, strings, bytes, tensors, and lists, tuples and dicts of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sley_core.errors import RunError
from sley_core.json_values import from_json, to_json

if TYPE_CHECKING:
    from sley_core.model.layers import Layer

KEY = "_extra_state"
"""How its name ends, as in torch's state dict."""


def with_extra_state(layers: Iterable[Layer]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the name of the extra state, and the module, of each module that has one."""
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{name}.{KEY}", module


def extra_state(name: str, module: nn.Module) -> Tensor:
    """Returns the extra state of `module`, uint8 [bytes], on the host. Raises RunError `extra-state` if it is no plain data."""
    try:
        text = json.dumps(to_json(module.get_extra_state()))
    except TypeError as error:
        raise RunError(
            "extra-state",
            f"what {type(module).__name__}.get_extra_state() returns cannot be saved as {name!r}: {error}",
            hint="return numbers, strings, bytes, tensors, and lists, tuples and dicts of them",
        ) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def check_extra_states(layers: Iterable[Layer]) -> None:
    """Raises RunError `extra-state` for a module whose extra state cannot be saved. Some have none before their first use."""
    for name, module in with_extra_state(layers):
        with suppress(AttributeError):
            extra_state(name, module)


def set_extra_state(module: nn.Module, value: Tensor) -> None:
    """Calls `set_extra_state` of `module` with what `extra_state` has returned."""
    module.set_extra_state(from_json(json.loads(value.cpu().numpy().tobytes())))
