"""Activation policies: what a layer keeps between its forward and its backward.

`core.keep` keeps everything that autograd saves; `core.recompute` keeps a layer's inputs only. Recomputation is torch's
non-reentrant checkpoint. The generators' states need not be saved: `LayerCaller` seeds them before every layer, in
recomputation as in the first forward.

torch's checkpoint detects that a tensor argument was written in place since, but it does not look into tuples and dicts, and
would recompute from the changed values without an error. So the version counters of all tensors in the arguments are compared
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sley_core.errors import RunError
from sley_core.protocols import ActivationPolicy

if TYPE_CHECKING:
    from sley_core.engine.config import KeepConfig, RecomputeConfig
    from sley_core.engine.step_state import MicroStep


_ASIDE = ContextVar("aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Returns a context manager for calls, within a layer's forward, that are no part of what the layer computes, as when an
    attention is tried out: a second run of the layer does not repeat them, so policies keep none of their results for it.
    Calls that autograd would record must be made under `torch.no_grad()`, too.
    """
    token = _ASIDE.set(True)
    try:
        yield
    finally:
        _ASIDE.reset(token)


def is_aside() -> bool:
    """Returns whether this thread is within `aside`."""
    return _ASIDE.get()


class Keep(ActivationPolicy):
    """Calls layers unchanged: autograd saves what it needs."""

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        return layer(*args, **fields)


class Recompute(ActivationPolicy):
    """Recomputes the layers named in `names`: they keep only their inputs, and run again once when their backward needs them.

    Raises RunError `recompute-in-place` if the inputs of one are written in place: the second run would start from other
    values.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Returns the output of `layer`, called through torch's checkpoint if `name` is one of `names`.

        Raises RunError `recompute-in-place` if an input was written in place, now or when the backward recomputes.
        """
        if name not in self.names:
            return layer(*args, **fields)
        before = _versions(args, fields)

        def run(*args: Any, **fields: Any) -> Any:
            _check_unchanged(name, before, args, fields)  # in the backward: a later layer may have written in place
            return layer(*args, **fields)

        output = checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts, **fields
        )
        _check_unchanged(name, before, args, fields)
        return output

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns the context managers around a layer's first run and around its recomputation, made once per call: here empty
        ones.
        """
        return nullcontext(), nullcontext()


def _check_unchanged(name: str, before: list[int], args: tuple[Any, ...], fields: Mapping[str, Any]) -> None:
    """Raises RunError `recompute-in-place` if any input's version counter differs from `before`."""
    if _versions(args, fields) != before:
        raise RunError(
            "recompute-in-place",
            f"the input of layer {name!r} is written on, by the layer or by a later one, so it cannot run again from it",
            hint="let them make new tensors (`h = h * 2`, `inplace=False`), or lower the `fraction` of `core.recompute`",
        )


def _versions(args: tuple[Any, ...], fields: Mapping[str, Any]) -> list[int]:
    return [tensor._version for tensor in tensors_in((*args, *fields.values()))]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among `values`, those in nested containers and dataclasses included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values())
        elif is_dataclass(value):
            yield from tensors_in(vars(value).values())


def keep(config: KeepConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """Builds `core.keep`."""
    return Keep()


def recompute(config: RecomputeConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """Builds `core.recompute` for the first round(fraction x blocks) blocks. layer_names: the whole model's, in order; the
    first and the last layer are no blocks.
    """
    blocks = layer_names[1:-1]
    return Recompute(frozenset(blocks[: int(config.fraction * len(blocks) + 0.5)]))
