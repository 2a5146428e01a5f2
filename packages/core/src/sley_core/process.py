"""Spares a process work that a run does not need: torch's compiler, the collector of cycles, memory that glibc gives back.

Torch's compiler is imported only if the plan compiles:

torch marks what its compiler must not trace, such as an optimizer's `add_param_group`, with a wrapper that imports the
compiler, and with it sympy, at the first call: about 850 modules and a second of processor time in every rank. The function
that the wrapper then calls is cached as an attribute of the wrapped function. If the attribute is set beforehand to that
function, nothing is imported. Only compiled code would notice a difference, and the compiler traces none of these: a plan
compiles layers. Recomputation (torch.utils.checkpoint) and an optimizer by factory import the compiler all the same.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps the collector from running within the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""

_TUNED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Environment variables that glibc reads for the same purpose."""

_NEVER = -1
_MOST_BYTES = 32 << 20
"""The largest block that glibc can be told to allocate from its heap, on 64 bits; it maps larger ones."""


def keep_freed_memory(environ: Mapping[str, str] | None = None) -> bool:
    """Tells glibc to keep freed memory; returns whether it did. For the whole process, and for memory mapped from now on.

    Does nothing if the environment tunes malloc already, or with another C library.

    A backward frees what the forward kept, megabytes at a time. glibc's malloc maps large blocks one by one, or returns the top
    of its heap to the system when enough of it is free, so every step costs thousands of page faults: up to 4 % of its time
    (docs/measurements.md). The next step needs the same memory, so nothing is lost by keeping it.
    """
    environ = os.environ if environ is None else environ
    if any(name in environ for name in _TUNED) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MOST_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
