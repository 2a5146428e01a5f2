"""Tells whether a process is as it was before it ran a test, so that it can run another.

What can be undone is undone (`Before.restore`): modules of tests are forgotten, caches emptied, random numbers set back. What
cannot be is looked for, and named where it is found: names in our modules, in their classes and objects and in those of torch
that tests replace, flags of torch and Python, threads, files, child processes.

What is not looked for: what objects of other packages have within, and what C code keeps without a name in Python.
"""

from __future__ import annotations

import gc
import importlib
import logging
import operator
import os
import random
import resource
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sley_core.comm import startup
from sley_core.factory import is_installed

OURS = ("sley_", "train_cli")
"""How the names of modules begin in which nothing may change."""

PYTHONS = {"builtins", "gc", "os", "random", "signal", "socket", "subprocess", "tempfile", "threading", "time"}
"""Of Python's own, those that tests patch; what they keep to themselves is theirs."""

TORCHS = {
    "torch",
    "torch._tensor",
    "torch.autograd",
    "torch.autograd.function",
    "torch.autograd.graph",
    "torch.cuda",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.modules.module",
    "torch.nn.parameter",
    "torch.optim",
    "torch.optim.adamw",
    "torch.optim.optimizer",
    "torch.optim.sgd",
    "torch.random",
    "torch.utils.checkpoint",
}
"""Of torch's, those that tests patch."""

MEANT = {
    "sley_cma.connection._kept",  # of the whole process, as peers of failed runs may still write there
    "sley_core.plan.loader._sound",  # of use as long as the module is the same
    "sley_testing.preload.before",
    "torch.distributed.distributed_c10d._backend",  # what the last group had, and where it met
    "torch.distributed.distributed_c10d._default_pg_init_method",
    "torch.utils.checkpoint.DefaultDeviceType._default_device_type",
}
"""Names that change by themselves, and containers that grow."""

LIMITS = [getattr(resource, name) for name in ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_STACK")]

GROWTH_BYTES = 256 * 2**20
"""What more memory than before a process may have; a run on small models leaves a tenth of that."""

CONTAINERS = (dict, list, set, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


class Before:
    """The state of this process when this is made: before its first test."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._spaces = [(name, space, list(space), list(space.values())) for name, space in _namespaces()]
        self._contents = {name: (one, _contents(one)) for name, one in self._containers()}
        self._caches = [one for *_, values in self._spaces for one in values if type(one) is _lru_cache_wrapper]
        self._random = torch.get_rng_state(), np.random.get_state()
        self._hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
        self._warnings = warnings.filters[:]
        self._loggers = _loggers()
        self._flags = _flags()
        self._handlers = _handlers()
        self._own: dict[str, Any] = {}
        self._memory_bytes = _memory_bytes()

    def begin(self) -> None:
        """Notes what a forked process has of its own, to be compared too; call before its first test."""
        self._own = _own()
        self._memory_bytes = _memory_bytes()

    def restore(self, *, handlers: bool = True) -> list[str]:
        """Undoes what can be undone; what else differs, in words: nothing where the process can be used again.

        handlers: whether those of signals are compared, too.
        """
        self._set_back()
        gc.collect()
        found = [f"{name} is {now}, was {was}" for name, was, now in _differences(self._flags, _flags())]
        if handlers:
            found += [f"{name} is {now}, was {was}" for name, was, now in _differences(self._handlers, _handlers())]
        found += [f"{name} is {now}, was {was}" for name, was, now in _differences(self._own, _own())]
        if _memory_bytes() > self._memory_bytes + GROWTH_BYTES:
            found.append("memory")
        found += self._changed_names()
        for name, (one, was) in self._contents.items():
            now = _contents(one)
            if len(now) != len(was) or not all(map(operator.is_, now, was)):
                found.append(f"{name} has other contents: {len(now)}, had {len(was)}")
        return found

    def _set_back(self) -> None:
        """Restores the state of the process: modules, caches, generators, hooks, warnings, loggers."""
        self._forget_modules()
        for cache in self._caches:
            cache.cache_clear()
        startup.forget()  # the next test's ranks meet elsewhere, or at the same port with another past
        torch.set_rng_state(self._random[0])
        np.random.set_state(self._random[1])
        random.seed()  # as Python does where it forks
        sys.excepthook, sys.unraisablehook, threading.excepthook = self._hooks  # torch and `rank_process` set them
        warnings.filters[:] = self._warnings  # type: ignore[index]  # a list
        warnings._filters_mutated()  # type: ignore[attr-defined]  # private; what warned once may warn again
        for logger in _loggers():
            logger.level, logger.propagate, logger.disabled, handlers = self._loggers.get(logger, (0, True, False, ()))
            logger.handlers[:] = handlers
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # private: what loggers remember of their levels

    def _forget_modules(self) -> None:
        """Modules that came with tests; those of installed packages stay."""
        importlib.invalidate_caches()  # of folders too, which a test may have filled since
        for name in set(sys.modules) - self._modules:
            if not _is_installed(sys.modules[name]):
                del sys.modules[name]

    def _containers(self) -> Iterator[tuple[str, Any]]:
        """Yields place and value of the module-level containers of our packages, except those meant to change."""
        for place, _, names, values in self._spaces:
            for name, value in zip(names, values, strict=True):
                if not issubclass(type(value), CONTAINERS) or not place.startswith(OURS):
                    continue
                # each module has the one dict of builtins, which are compared by themselves
                if name != "__builtins__" and f"{place}.{name}" not in MEANT:
                    yield f"{place}.{name}", value

    def _changed_names(self) -> Iterator[str]:
        """Yields a text for each module-level name that is another object than before."""
        for place, space, names, values in self._spaces:
            if len(space) == len(names) and all(map(operator.is_, space.values(), values)):
                continue
            was = dict(zip(names, values, strict=True))
            for name in was.keys() | space.keys():
                now = space.get(name)
                if now is not was.get(name) and not _is_harmless(place, name, now):
                    yield f"{place}.{name} is {now!r}, was {was.get(name)!r}"


def _contents(container: Any) -> list[Any]:
    """Its keys and values or its elements; of one that does not keep them alive, how many there are, as places."""
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container) if isinstance(container, list | set) else [None] * len(container)


def _loggers() -> dict[logging.Logger, tuple[int, bool, bool, Sequence[logging.Handler]]]:
    """Returns level, propagation, whether it is off, and handlers of each logger."""
    known = [one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    return {one: (one.level, one.propagate, one.disabled, tuple(one.handlers)) for one in (logging.root, *known)}


def _namespaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the names of each module that is looked into, and those of the classes and objects that it made."""
    for name, module in list(sys.modules.items()):
        if not (name.startswith(OURS) or name in PYTHONS | TORCHS):
            continue
        yield name, vars(module)
        for key, value in list(vars(module).items()):
            if issubclass(type(value), type):  # `isinstance` asks the value, and torch has some that warn
                if value.__module__ == name:
                    yield f"{name}.{key}", vars(value)
            elif type(value).__module__.startswith(OURS) and hasattr(value, "__dict__"):
                yield f"{name}.{key}", vars(value)


def _is_harmless(place: str, name: str, now: Any) -> bool:
    """Returns whether a changed name is what Python and imports put into modules and classes by themselves, or is meant."""
    by_python = ("__warningregistry__", "__annotations__", "__slotnames__")
    meant = f"{place}.{name}" in MEANT
    return meant or type(now) is ModuleType or name in by_python or (place in PYTHONS and name.startswith("_"))


def _is_installed(module: ModuleType) -> bool:
    """Returns whether a module belongs to Python, to a package of its environment, or to one that was there before any test."""
    file = getattr(module, "__file__", None)
    if file is None:
        return not hasattr(module, "__path__")  # built in; what pytest makes up for folders has no file either
    return is_installed(file)


def _flags() -> dict[str, Any]:
    """Returns what a program sets for its whole process, or thread, by name."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "processes' groups": torch.distributed.is_initialized(),
        "denormal numbers": bool(torch.tensor(1e-310, dtype=torch.float64) * 1.0),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.callbacks[:]),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "recursion limit": sys.getrecursionlimit(),
        "limits": [resource.getrlimit(number) for number in LIMITS],
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    }


def _handlers() -> dict[str, Any]:
    """Returns what each signal does, by name."""
    return {number.name: signal.getsignal(number) for number in signal.Signals if number.name != "SIGCHLD"}


def _own() -> dict[str, Any]:
    """Returns what this process has that others cannot have from it: threads, open files, children, mask of new files."""
    tasks = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else threading.active_count()
    os.umask(mask := os.umask(0))
    files = len(list(Path("/dev/fd").iterdir()))
    return {"threads": tasks, "open files": files, "children": _has_children(), "mask of new files": mask}


def _memory_bytes() -> int:
    """Returns the bytes of this process that are in memory; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()


def _has_children() -> bool:
    """Returns whether this process has child processes; reaps one that has ended."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, was in before.items():
        if now[name] != was:
            yield name, was, now[name]
