"""Avoids importing torch's compiler, which a run needs only if its plan compiles.

torch marks what its compiler must not trace, such as an optimizer's `add_param_group`, with a wrapper that imports the
compiler, and with it sympy, at the first call: about 850 modules and a second of processor time in every rank. The function
that the wrapper then calls is cached as an attribute of the wrapped function. If the attribute is set beforehand to that
function, nothing is imported. Only compiled code would notice a difference, and the compiler traces none of these: a plan
compiles layers. Recomputation (torch.utils.checkpoint) and an optimizer by factory import the compiler all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

MARKED: tuple[Callable[..., Any], ...] = (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
)


def leave_compiler_out() -> None:
    """Lets the optimizer methods that a run calls work without importing the compiler; does nothing if torch marks them
    differently.
    """
    for function in MARKED:
        behind = getattr(function, "__wrapped__", None)
        if behind is not None and not hasattr(behind, "__dynamo_disable"):
            behind.__dynamo_disable = behind


@cache
def stepping_without(kind: type[Optimizer]) -> type[Optimizer]:
    """Returns a subclass of torch's optimizer `kind` that steps as it does, hooks included, without importing the compiler.

    torch imports it at each step, to break a graph that is being compiled. Not for `differentiable`. An instance is pickled and
    copied as one of `kind`.
    """
    behind: Any = inspect.unwrap(kind.step)

    @torch.no_grad()
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        found: float | None = behind(self, closure)
        return found

    def reduced(self: Optimizer) -> tuple[Any, ...]:
        return object.__new__, (kind,), self.__getstate__()

    named = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"step": step, "__reduce__": reduced, **named})
