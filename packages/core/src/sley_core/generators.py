"""Seeds the generators of this process for each use: torch's default one, those of `random` and numpy, and those in modules.

A use is a layer in a micro-batch, or a sample that is read. Each has a seed that no layout changes, so it draws the same
numbers on every rank, and again in recomputation. A data set that draws, in another thread, takes turns with layers (`IN_USE`).
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sley_core.errors import PlanError

IN_USE: Any = threading.RLock()
"""The lock of the generators, while they are seeded for a layer or for a sample that is read."""

_STATE: Any = threading.RLock()
"""The lock of saved states, for a moment."""

for _lock in (IN_USE, _STATE):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # another thread may hold it then, which the child lacks

_PLAIN = (str, bytes, int, float, complex, bool, type(None), Tensor, torch.dtype, torch.device, nn.Module, type, ModuleType)
_DEPTH = 6
_ODD = 0x9E3779B97F4A7C15


def seed_host(seed: int) -> None:
    """Seeds torch's default generator of the host, `random` and numpy's legacy generator. seed: in [0, 2**63).

    numpy gets the bits that torch's CPU generator ignores: both are the same algorithm, and would draw the same numbers.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed >> 31)


State = tuple[Tensor, Any, Any]
"""The states of torch's default generator of the host, of `random` and of numpy (None without numpy)."""


def host_state() -> State:
    """Returns the states of the generators that `seed_host` seeds, not those of a sample that another thread is reading."""
    with _STATE:
        return _own_state() if _Seeded.running is None else _Seeded.running.before


def set_host_state(state: State) -> None:
    """Restores a result of `host_state`, now or as soon as another thread has read its sample."""
    with _STATE:
        if _Seeded.running is None:
            _set_own_state(state)
        else:
            _Seeded.running.before = state


class _Seeded:
    """A use of generators that are restored after it. before: the states to restore."""

    running: ClassVar[_Seeded | None] = None

    def __init__(self) -> None:
        self.before = _own_state()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Returns a context manager with the generators of the host seeded; afterwards they have the states from before."""
    with IN_USE:
        with _STATE:
            outer, use = _Seeded.running, _Seeded()
            _Seeded.running = use
            seed_host(seed)
        try:
            yield
        finally:
            with _STATE:
                _Seeded.running = outer
                _set_own_state(use.before)


@contextmanager
def seeded_as_plain(seed: int) -> Iterator[None]:
    """Returns a context manager as `seeded`, with the generators in the states that a program gives them by
    `torch.manual_seed(seed)`, `random.seed(seed)` and `numpy.random.seed(seed % 2**32)`: the present CUDA device's, too.
    """
    on_device = torch.cuda.default_generators[torch.cuda.current_device()] if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's
    with seeded(seed):
        state = None if on_device is None else on_device.get_state()
        if on_device is not None:
            on_device.manual_seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            if on_device is not None and state is not None:
                on_device.set_state(state)


def _own_state() -> State:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()


def _set_own_state(state: State) -> None:
    of_torch, of_python, of_numpy = state
    torch.default_generator.set_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def comparable_state() -> tuple[Any, ...]:
    """Returns the present states of the generators of the host, in a form that compares by `==`."""
    of_torch, of_python, of_numpy = _own_state()
    numbers = (of_numpy[0], of_numpy[1].tobytes(), *of_numpy[2:]) if of_numpy else None
    return of_torch.numpy().tobytes(), of_python, numbers


def seed_own(generators: Iterable[Any], seed: int) -> None:
    for number, generator in enumerate(generators, 1):
        own = (seed + number * _ODD) % (1 << 63)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif hasattr(generator, "seed") and hasattr(generator, "_bit_generator"):  # numpy's RandomState
            generator.seed(own >> 31)
        else:  # numpy's Generator, or a bit generator
            bits = getattr(generator, "_bit_generator", generator)
            bits.state = type(bits)(own).state


def own_generators(module: nn.Module, name: str) -> list[Any]:
    """Returns the generators of a module and its submodules: in attributes, in containers and plain objects there, and those
    that their functions name. Raises PlanError "model-random" for one that cannot be seeded. name: the module's, for the error.
    """
    generators: dict[int, Any] = {}
    visited: set[int] = set()
    for path, part in module.named_modules(prefix=name):
        for generator in _generators_of(part, ("_parameters", "_buffers", "_modules"), visited):
            generators.setdefault(id(generator), _checked(generator, f"the module {path!r}", "model"))
    return list(generators.values())


def generators_of_function(function: Any) -> list[Any]:
    """Returns the generators that a function encloses or names, or a partial one binds, but not those of classes."""
    return list(_generators_in(function, set(), _DEPTH))


def generators_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the generators of an optimizer, as `own_generators` does. Raises PlanError "model-random"."""
    owner, every = f"the optimizer {type(optimizer).__name__}", _generators_of(optimizer, ("state", "param_groups"), set())
    return list({id(one): _checked(one, owner, "optimizer") for one in every}.values())


def _generators_of(owner: object, without: Sequence[str], visited: set[int]) -> Iterator[Any]:
    """Yields the generators in attributes of an object other than `without`, and in its class and bases, torch's left out."""
    bases = [base for base in type(owner).__mro__ if base is not object and not base.__module__.startswith("torch.")]
    values = [value for key, value in vars(owner).items() if key not in without]
    for value in (*values, *(value for base in bases for value in vars(base).values())):
        yield from _generators_in(value, visited, _DEPTH)


def _generators_in(value: Any, visited: set[int], depth: int) -> Iterator[Any]:
    return (one for one in leaves_in(value, visited, depth) if _is_generator(one))


def leaves_in(value: Any, visited: set[int], depth: int = _DEPTH) -> Iterator[Any]:
    """Yields the generators, modules and tensors that can be reached from `value`. visited: ids of objects to leave out."""
    if id(value) in visited or depth == 0:
        return
    visited.add(id(value))
    if isinstance(value, Tensor | nn.Module) or _is_generator(value):
        yield value
    elif not isinstance(value, _PLAIN):
        for part in _parts(value):
            yield from leaves_in(part, visited, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    """Yields the objects to which `value` refers, and those of a function's globals that may hold generators."""
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from list(value)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType | BuiltinFunctionType):
        yield from (value.__self__, getattr(value, "__func__", None))
    elif isinstance(value, FunctionType):
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {}, getattr(value, "__wrapped__", None))
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # not filled yet
                yield cell.cell_contents
        for name in _names(value.__code__):
            known = value.__globals__.get(name)
            is_own = isinstance(known, FunctionType) and known.__module__ == value.__module__
            if is_own or isinstance(known, list | tuple | dict) or _is_generator(known):
                yield known
    else:
        yield from list(getattr(value, "__dict__", {}).values())


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names in a function, and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    )


def _checked(generator: Any, owner: str, table: str) -> Any:
    """Returns a generator that can be seeded. Raises PlanError "model-random". owner, table: whose it is, for the error."""
    try:
        if isinstance(generator, random.SystemRandom):
            raise TypeError("it draws from the operating system")
        bits = getattr(generator, "_bit_generator", generator)
        if not isinstance(generator, torch.Generator | random.Random):
            type(bits)(0).state  # noqa: B018  # one of another kind may need more arguments
            if isinstance(generator, sys.modules["numpy"].random.RandomState) and type(bits).__name__ != "MT19937":
                raise TypeError(f"it draws by {type(bits).__name__}")
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        kind = type(generator).__name__
        message = f"{owner} holds a {kind}, which cannot be seeded for each micro-batch: {error}"
        hint = "draw from torch's default generator, `random` or numpy, or from a `torch.Generator`"
        raise PlanError("model-random", message, path=(table,), hint=hint) from None
    return generator


def derive(seed: int, *parts: int | str) -> int:
    """Returns a seed in [0, 2**63) that depends on `seed` and on every part, its type and position; the same in every version.
    By SHA-256: Python's own `hash` is salted per process.
    """
    digest = sha256()
    for part in (seed, *parts):
        text = str(part).encode()
        digest.update(b"%c%d:%b" % (b"s" if isinstance(part, str) else b"i", len(text), text))
    return int.from_bytes(digest.digest()[:8], "big") >> 1
