"""What a layer keeps between its forward and its backward: everything, its inputs only, or these and what costs most.

Recomputation is torch's non-reentrant checkpoint. The generators need no saving: the function that calls layers seeds
them before every layer, in recomputation as in the first forward.

torch looks whether a tensor that a layer was called with has been written on since, but not into tuples and dicts, where it
would go on with other numbers. So it is asked here, of whatever crosses between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sley_core.errors import RunError
from sley_core.protocols import ActivationPolicy

if TYPE_CHECKING:
    from sley_core.engine.config import KeepConfig, RecomputeConfig
    from sley_core.engine.step_state import MicroStep


class Keep(ActivationPolicy):
    """Autograd keeps what it needs."""

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        return layer(*args, **fields)


class Recompute(ActivationPolicy):
    """The layers named in `names` keep only their inputs and run again, once, when their backward needs them.

    Raises RunError `recompute-in-place` if the inputs of one are written in place: the second run would start from
    other values.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        if name not in self.names:
            return layer(*args, **fields)
        before = _versions(args, fields)

        def run(*args: Any, **fields: Any) -> Any:
            _check_unchanged(name, before, args, fields)  # the second time: a later layer may have written on them
            return layer(*args, **fields)

        output = checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts, **fields
        )
        _check_unchanged(name, before, args, fields)
        return output

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns what surrounds a layer's first run and its second, asked once per call: here nothing."""
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
    """`core.keep`."""
    return Keep()


def recompute(config: RecomputeConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """`core.recompute`: of `layer_names` (the whole model's, in order) the first round(fraction x blocks) blocks."""
    blocks = layer_names[1:-1]
    return Recompute(frozenset(blocks[: int(config.fraction * len(blocks) + 0.5)]))
