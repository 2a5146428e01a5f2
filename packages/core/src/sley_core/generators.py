"""Seeds random generators before each use: the CPU generators of torch, `random` and numpy, and the generators in a model.

A use is the forward of a layer for a microbatch, or the read of a sample. Its seed does not depend on the layout, so every
layout, and every recomputation, draws the same numbers. Seeded reads, which run in a thread, must not run beside forwards.
"""

import os
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.errors import PlanError, RunError, is_installed

_USE_LOCK: Any = threading.RLock()
"""The lock that a thread holds within `use_seed`."""

_STATE_LOCK: Any = threading.RLock()
"""The lock that protects `_outer_states`. A thread holds it only briefly."""

for _lock in (_USE_LOCK, _STATE_LOCK):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # a thread that holds the lock does not exist in the child

_LEAF_TYPES = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, type, ModuleType)
"""The types of objects that refer to no generators."""


def seed_host(seed: int) -> None:
    """Seeds torch's default CPU generator, `random` and, if imported, numpy's legacy generator. seed: in [0, 2**63)."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        # torch uses only the low 32 bits. From the same bits, numpy would draw the same numbers, so it gets the high bits.
        numpy.random.seed(seed >> 31)


HostState = tuple[Tensor, Any, Any]
"""The states of torch's default CPU generator, of `random`, and of numpy's legacy generator (None if numpy is not imported)."""

_outer_states: list[HostState] = []
"""The states that will be restored at the end of each seeded use in progress, the innermost use last."""


def host_rng_state() -> HostState:
    """Returns the states of the generators that `seed_host` seeds; during a seeded use, the states that its end restores."""
    with _STATE_LOCK:
        return _outer_states[-1] if _outer_states else _read_state()


def set_host_rng_state(state: HostState) -> None:
    """Restores the states of the host's generators from a result of `host_rng_state`; during a seeded use, at the end of that
    use.
    """
    with _STATE_LOCK:
        if _outer_states:
            _outer_states[-1] = state
        else:
            _write_state(state)


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Calls `seed_host(seed)` for the block, and restores the states of the generators afterwards."""
    with _USE_LOCK:
        with _STATE_LOCK:
            _outer_states.append(_read_state())
            seed_host(seed)
        try:
            yield
        finally:
            with _STATE_LOCK:
                _write_state(_outer_states.pop())


def wait_for_seeded_reads(timeout_s: float) -> None:
    """Returns when no other thread is within `use_seed`. Raises RunError "data-timeout" after `timeout_s` seconds."""
    if not _USE_LOCK.acquire(timeout=timeout_s):
        message = f"a read of the dataset has not ended within {timeout_s:g} s, and draws from the generators that layers use"
        hint = "use a separate generator in the dataset, or increase [limits] data_timeout_s"
        raise RunError("data-timeout", message, hint=hint)
    _USE_LOCK.release()


@contextmanager
def use_program_seed(seed: int) -> Iterator[None]:
    """Seeds the generators for the block in the same way as the calls `torch.manual_seed(seed)`, `random.seed(seed)` and
    `numpy.random.seed(seed % 2**32)`, and restores their states afterwards. Includes the current CUDA device's generator.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with use_seed(seed), torch.random.fork_rng(devices):
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        yield


def _read_state() -> HostState:
    numpy = sys.modules.get("numpy")
    return torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()


def _write_state(state: HostState) -> None:
    torch_state, python_state, numpy_state = state
    torch.default_generator.set_state(torch_state)
    random.setstate(python_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


def comparable_state() -> tuple[Any, ...]:
    """Returns the present states of the generators that `seed_host` seeds, in a form that can be compared by `==`."""
    torch_state, python_state, numpy_state = _read_state()
    numpy_values = (numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]) if numpy_state else None
    return torch_state.numpy().tobytes(), python_state, numpy_values


def seed_generators(generators: Iterable[Any], seed: int) -> None:
    """Seeds each generator with a different seed that depends on `seed` and the generator's position."""
    for number, generator in enumerate(generators, 1):
        generator_seed = (seed + number * 0x9E3779B97F4A7C15) % (1 << 63)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(generator_seed)
        elif isinstance(generator, random.Random):
            generator.seed(generator_seed)
        elif hasattr(generator, "seed") and hasattr(generator, "_bit_generator"):  # numpy's RandomState
            generator.seed(generator_seed >> 31)
        else:  # numpy's Generator, or a bit generator
            bit_generator = getattr(generator, "_bit_generator", generator)
            bit_generator.state = type(bit_generator)(generator_seed).state


def find_module_generators(module: nn.Module, name: str) -> list[Any]:
    """Returns the generators reachable from the attributes and functions of a module and its submodules. name: the module's
    name, for errors. Raises PlanError "model-random" for a generator that cannot be seeded.
    """
    visited: set[int] = set()
    return [
        _check_seedable(generator, f"the module {path!r}", "model")
        for path, part in module.named_modules(prefix=name)
        for generator in _attribute_generators(part, ("_parameters", "_buffers", "_modules"), visited)
    ]


def find_function_generators(function: Any) -> list[Any]:
    """Returns the generators in the closure, default arguments and globals of a function, or in a partial function."""
    return list(filter(_is_random_generator, iterate_leaves(function, set())))


def find_optimizer_generators(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the generators reachable from an optimizer. Raises PlanError "model-random" if one cannot be seeded."""
    owner = f"the optimizer {type(optimizer).__name__}"
    generators = _attribute_generators(optimizer, ("state", "param_groups"), set())
    return [_check_seedable(generator, owner, "optimizer") for generator in generators]


def _attribute_generators(owner: object, excluded: Sequence[str], visited: set[int]) -> Iterator[Any]:
    bases = [base for base in type(owner).__mro__ if base is not object and not base.__module__.startswith("torch.")]
    values = [value for key, value in vars(owner).items() if key not in excluded]
    for value in (*values, *(value for base in bases for value in vars(base).values())):
        yield from filter(_is_random_generator, iterate_leaves(value, visited))


def iterate_leaves(value: Any, visited: set[int], depth: int = 6) -> Iterator[Any]:
    """Yields the generators, modules and tensors within `depth` references of `value`. Skips ids in `visited`, adds new ids."""
    if isinstance(value, _LEAF_TYPES) or id(value) in visited or depth == 0:
        return
    visited.add(id(value))
    if isinstance(value, (Tensor, nn.Module)) or _is_random_generator(value):
        yield value
    else:
        for part in _referenced_objects(value):
            yield from iterate_leaves(part, visited, depth - 1)


def _referenced_objects(value: Any) -> Iterator[Any]:
    """Yields the objects to which `value` refers. A function's globals, and those of modules that it names, are included only
    if they may refer to generators; functions of other modules only if these are not installed.
    """
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
        names = list(_code_names(value.__code__))
        candidates = [value.__globals__.get(name) for name in names]
        modules = [vars(candidate) for candidate in candidates if isinstance(candidate, ModuleType)]
        modules = [module for module in modules if not _is_installed(module.get("__file__"))]
        candidates += [module.get(name) for module in modules for name in names]
        for candidate in candidates:
            is_searched = isinstance(candidate, FunctionType) and (
                candidate.__module__ == value.__module__ or not _is_installed(candidate.__code__.co_filename)
            )
            if is_searched or isinstance(candidate, list | tuple | dict) or _is_random_generator(candidate):
                yield candidate
    else:
        yield from list(getattr(value, "__dict__", {}).values())


@cache
def _is_installed(file: str | None) -> bool:
    """Returns whether `file`, the file of a module, is not the user's own. None is the file of a built-in module."""
    return file is None or is_installed(file)


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


def _is_random_generator(value: Any) -> bool:
    # Not `isinstance`: the metaclass of torch.Generator implements it in Python, which takes seven times as long.
    return not _generator_type_ids(sys.modules.get("numpy")).isdisjoint(map(id, type(value).__mro__))


@cache
def _generator_type_ids(numpy: Any) -> frozenset[int]:
    """Returns the ids of the classes of random generators. numpy: the module, or None if it is not imported."""
    types: list[type] = [torch.Generator, random.Random]
    if numpy is not None:
        types += [numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator]
    return frozenset(map(id, types))


def _check_seedable(generator: Any, owner: str, table: str) -> Any:
    """Returns `generator`. Raises PlanError "model-random" if it cannot be seeded."""
    try:
        if isinstance(generator, random.SystemRandom):
            raise TypeError("it draws from the operating system")
        bit_generator = getattr(generator, "_bit_generator", generator)
        if not isinstance(generator, torch.Generator | random.Random):
            type(bit_generator)(0).state  # noqa: B018  # raises if the type needs more arguments
            if isinstance(generator, sys.modules["numpy"].random.RandomState) and type(bit_generator).__name__ != "MT19937":
                raise TypeError(f"it draws by {type(bit_generator).__name__}")
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        type_name = type(generator).__name__
        message = f"{owner} has a {type_name}, which cannot be seeded for each microbatch: {error}"
        hint = "use torch's default generator, `random`, numpy or a `torch.Generator`"
        raise PlanError("model-random", message, path=(table,), hint=hint) from None
    return generator


def derive_seed(seed: int, *parts: int | str) -> int:
    """Returns a seed in [0, 2**63) that depends on `seed` and on the type, value and position of each of `parts`, and is the
    same in every process and version of Python.
    """
    digest = sha256()
    for part in (seed, *parts):
        text = str(part).encode()
        digest.update(b"%c%d:%b" % (b"s" if isinstance(part, str) else b"i", len(text), text))
    return int.from_bytes(digest.digest()[:8], "big") >> 1
