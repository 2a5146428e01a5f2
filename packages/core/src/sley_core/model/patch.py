"""Replaces a module's forward temporarily.

    module(x) ──> the latest patch ──> ... ──> the first patch ──> the module's own forward

Several runs may patch one module and close in any order, so a patch can be undone whether or not another was made after it, and
leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class ForwardPatch:
    """Makes `module(...)` call `forward`, from its construction until `undo`.

    The latest patch of a module is called; the forward below it is `module.forward` as read before patching, and may be called
    from the patch. Patches are undone in any order, and after the last the module's `__dict__` is what it was before the first.
    A forward that a program has assigned over a patch stays, and then has the module without the patch below it. A copy or
    pickle of the module has the forward of the module without patches.
    """

    __slots__ = ("_below", "_forward", "module")

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        self._forward: Callable[..., Any] | None = forward
        self._below: Callable[..., Any] | None = vars(module).get("forward")
        # Not by setattr: a module may have its own, and torch's would register a forward that is itself a module.
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **more: Any) -> Any:
        return (self.__wrapped__ if self._forward is None else self._forward)(*args, **more)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward below this patch; `inspect.signature` finds the module's own signature through it."""
        if self._below is not None:
            return self._below
        own: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return own

    def undo(self) -> None:
        """Removes the patch, also from below later ones; does nothing the second time."""
        if self._forward is None:
            return
        self._forward = None  # code that kept a reference to the patch now calls the forward below it
        held = vars(self.module)
        above = held.get("forward")
        if above is not self:
            while isinstance(above, ForwardPatch) and above._below is not self:
                above = above._below
            if isinstance(above, ForwardPatch):
                above._below = self._below
        elif self._below is None:
            del held["forward"]
        else:
            held["forward"] = self._below

    def __reduce__(self) -> tuple[object, ...]:
        if self._below is None:
            return getattr, (self.module, "forward")  # by then the copy has no forward but its class's
        return _itself, (self._below,)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
