"""Refuses calls of layers whose weights or buffers are away, also of those that a program makes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle


class Gate:
    """Hooks on every module of `modules` while it is closed; none while it is open, so that a step pays nothing.

    check: called before a module's forward; makes weights that are coming usable, or raises for what is away.
    """

    def __init__(self, modules: Sequence[nn.Module], check: Callable[[], None]) -> None:
        self._modules = modules
        self._check = check
        self._hooks: list[RemovableHandle] = []

    @property
    def is_closed(self) -> bool:
        """Whether calls of the modules are checked."""
        return bool(self._hooks)

    def close(self) -> None:
        """Puts the hooks on, before those that the program has."""
        if not self._hooks:
            for layer in self._modules:
                for module in layer.modules():
                    self._hooks.append(module.register_forward_pre_hook(self._before, prepend=True))
                    self._hooks.append(module.register_state_dict_pre_hook(self._before_reading))  # type: ignore[no-untyped-call]  # torch's

    def open(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_reading(self, *_: Any) -> None:
        self._check()

    def _before(self, _module: nn.Module, _args: Any) -> None:
        self._check()
