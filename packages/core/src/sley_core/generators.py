"""Seeds the generators of this process for each use: torch's default one, those of `random` and numpy, and those in modules.

A use is a layer in a micro-batch, or a sample that is read. Each has a seed that no layout changes, so it draws the same
numbers on every rank, and again in recomputation. `GENERATOR_LOCK` keeps a dataset in another thread and layers from drawing at
the same time.
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

GENERATOR_LOCK: Any = threading.RLock()
"""The lock of the generators, while they are seeded for a layer or for a sample that is read."""

_STATE_LOCK: Any = threading.RLock()
"""The lock of saved states, for a moment."""

for _lock in (GENERATOR_LOCK, _STATE_LOCK):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # another thread may hold it then, which the child lacks

_PLAIN = (str, bytes, int, float, complex, bool, type(None), Tensor, torch.dtype, torch.device, nn.Module, type, ModuleType)
_MAX_DEPTH = 6
_SEED_STRIDE = 0x9E3779B97F4A7C15


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
    with _STATE_LOCK:
        return _read_state() if _SeededUse.running is None else _SeededUse.running.before


def set_host_state(state: State) -> None:
    """Restores a result of `host_state`, now or as soon as another thread has read its sample."""
    with _STATE_LOCK:
        if _SeededUse.running is None:
            _write_state(state)
        else:
            _SeededUse.running.before = state


class _SeededUse:
    """Holds the states to restore after a use of the generators, as `before`."""

    running: ClassVar[_SeededUse | None] = None

    def __init__(self) -> None:
        self.before = _read_state()


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Seeds the generators of the host within the block, and restores their states afterwards."""
    with GENERATOR_LOCK:
        with _STATE_LOCK:
            outer, use = _SeededUse.running, _SeededUse()
            _SeededUse.running = use
            seed_host(seed)
        try:
            yield
        finally:
            with _STATE_LOCK:
                _SeededUse.running = outer
                _write_state(use.before)


@contextmanager
def use_program_seed(seed: int) -> Iterator[None]:
    """Seeds within the block like `use_seed`, with the generators in the states that a program gives them by
    `torch.manual_seed(seed)`, `random.seed(seed)` and `numpy.random.seed(seed % 2**32)`: the present CUDA device's, too.
    """
    on_device = torch.cuda.default_generators[torch.cuda.current_device()] if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's
    with use_seed(seed):
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


def _read_state() -> State:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()


def _write_state(state: State) -> None:
    of_torch, of_python, of_numpy = state
    torch.default_generator.set_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def comparable_state() -> tuple[Any, ...]:
    """Returns the present states of the generators of the host, in a form that compares by `==`."""
    of_torch, of_python, of_numpy = _read_state()
    numbers = (of_numpy[0], of_numpy[1].tobytes(), *of_numpy[2:]) if of_numpy else None
    return of_torch.numpy().tobytes(), of_python, numbers


def seed_generators(generators: Iterable[Any], seed: int) -> None:
    for number, generator in enumerate(generators, 1):
        own = (seed + number * _SEED_STRIDE) % (1 << 63)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif hasattr(generator, "seed") and hasattr(generator, "_bit_generator"):  # numpy's RandomState
            generator.seed(own >> 31)
        else:  # numpy's Generator, or a bit generator
            bits = getattr(generator, "_bit_generator", generator)
            bits.state = type(bits)(own).state


def module_generators(module: nn.Module, name: str) -> list[Any]:
    """Returns the generators of a module and its submodules: in attributes, in containers and plain objects there, and those
    that their functions name. Raises PlanError "model-random" for one that cannot be seeded. name: the module's, for the error.
    """
    generators: dict[int, Any] = {}
    visited: set[int] = set()
    for path, part in module.named_modules(prefix=name):
        for generator in _attribute_generators(part, ("_parameters", "_buffers", "_modules"), visited):
            generators.setdefault(id(generator), _check_seedable(generator, f"the module {path!r}", "model"))
    return list(generators.values())


def function_generators(function: Any) -> list[Any]:
    """Returns the generators that a function encloses or names, or a partial one binds, but not those of classes."""
    return list(_reachable_generators(function, set(), _MAX_DEPTH))


def optimizer_generators(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the generators of an optimizer, as `module_generators` does. Raises PlanError "model-random"."""
    owner, every = (
        f"the optimizer {type(optimizer).__name__}",
        _attribute_generators(optimizer, ("state", "param_groups"), set()),
    )
    return list({id(one): _check_seedable(one, owner, "optimizer") for one in every}.values())


def _attribute_generators(owner: object, without: Sequence[str], visited: set[int]) -> Iterator[Any]:
    """Yields the generators in attributes of an object other than `without`, and in its class and bases, torch's left out."""
    bases = [base for base in type(owner).__mro__ if base is not object and not base.__module__.startswith("torch.")]
    values = [value for key, value in vars(owner).items() if key not in without]
    for value in (*values, *(value for base in bases for value in vars(base).values())):
        yield from _reachable_generators(value, visited, _MAX_DEPTH)


def _reachable_generators(value: Any, visited: set[int], depth: int) -> Iterator[Any]:
    return (one for one in iterate_leaves(value, visited, depth) if _is_generator(one))


def iterate_leaves(value: Any, visited: set[int], depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Yields the generators, modules and tensors that can be reached from `value`. visited: ids of objects to leave out."""
    if id(value) in visited or depth == 0:
        return
    visited.add(id(value))
    if isinstance(value, Tensor | nn.Module) or _is_generator(value):
        yield value
    elif not isinstance(value, _PLAIN):
        for part in _referenced_objects(value):
            yield from iterate_leaves(part, visited, depth - 1)


def _referenced_objects(value: Any) -> Iterator[Any]:
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
        for name in _code_names(value.__code__):
            known = value.__globals__.get(name)
            is_own = isinstance(known, FunctionType) and known.__module__ == value.__module__
            if is_own or isinstance(known, list | tuple | dict) or _is_generator(known):
                yield known
    else:
        yield from list(getattr(value, "__dict__", {}).values())


def _code_names(code: CodeType) -> Iterator[str]:
    """Yields the names in a function and in its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    )


def _check_seedable(generator: Any, owner: str, table: str) -> Any:
    """Returns `generator`. Raises PlanError "model-random", with `owner` and `table`, if it cannot be seeded."""
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
