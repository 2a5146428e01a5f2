"""Activation policies: what a layer keeps between its forward and its backward.

`core.keep` keeps everything that autograd saves; `core.recompute` keeps a layer's inputs only. Recomputation is torch's
non-reentrant checkpoint. The generators' states need not be saved: `LayerCaller` seeds them before every layer, in
recomputation as in the first forward.

A layer may put its results into the dict, list or object that it is given. So its second run is given copies of these, made
before the first one, around the same tensors. torch's checkpoint detects that a tensor argument was written in place since, but
it does not look into tuples and dicts, and would recompute from the changed values without an error. So the version counters of
all tensors in the arguments are compared here; in the first step also their bits, for writes that no counter counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sley_core.engine.boundary import copied, parts_of
from sley_core.engine.step_state import Phase
from sley_core.errors import RunError
from sley_core.model.storage import sum_of_bits, version_of
from sley_core.protocols import ActivationPolicy

if TYPE_CHECKING:
    from sley_core.actions.action import Action
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
        self._num_steps = 0

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Counts the steps: inputs are looked at bit by bit in the first one."""
        self._num_steps += phase is Phase.TRAIN

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Returns the output of `layer`, called through torch's checkpoint if `name` is one of `names`.

        Raises RunError `recompute-in-place` if an input was written in place, now or when the backward recomputes.
        """
        if name not in self.names:
            return layer(*args, **fields)
        kept = copied((args, dict(fields)))
        given = _Given(name, kept, with_bits=self._num_steps == 1)
        first = [(args, fields)]  # dropped after the first run, which may put its output there: that owns the graph

        def run(kept: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
            if first:
                args, fields = first.pop()
            else:
                given.check(kept)  # a later layer may have written in place
                args, fields = copied(kept)
            return layer(*args, **fields)

        # In a tuple, whose tensors checkpoint keeps as they are: autograd saves none of torch's inference mode.
        output = checkpoint(run, kept, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts)
        given.check(kept)
        return output

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns the context managers around a layer's first run and around its recomputation, made once per call: here empty
        ones.
        """
        return nullcontext(), nullcontext()


class _Given:
    """Remembers the versions of all tensors that layer `name` is given, without keeping these. with_bits: their bits too."""

    def __init__(self, name: str, given: Any, *, with_bits: bool) -> None:
        self.name = name
        self.with_bits = with_bits
        self._before = self._look(given)

    def check(self, given: Any) -> None:
        """Raises RunError `recompute-in-place` if any of the tensors was written. Waits for the device if `with_bits`."""
        if self._look(given) != self._before:
            raise RunError(
                "recompute-in-place",
                f"the input of layer {self.name!r} is written on, by the layer or by a later one, so it cannot run again "
                "from it",
                hint="let them make new tensors (`h = h * 2`, `inplace=False`), or lower the `fraction` of `core.recompute`",
            )

    def _look(self, given: Any) -> list[tuple[int, int]]:
        found = [(version_of(one), sum_of_bits(one) if self.with_bits else None) for one in tensors_in((given,))]
        return [(version, 0 if bits is None else int(bits)) for version, bits in found]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among `values`, those in nested containers and objects included, each once."""
    return _tensors_in(values, {})


def _tensors_in(values: Iterable[Any], seen: dict[int, Any]) -> Iterator[Tensor]:
    for value in values:
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors_in(parts_of(value), seen)


def keep(config: KeepConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """Builds `core.keep`."""
    return Keep()


def recompute(config: RecomputeConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """Builds `core.recompute` for the first blocks, as many as the fraction is of all, rounded half up. layer_names: the whole
    model's, in order; the first and the last layer are no blocks.
    """
    blocks = layer_names[1:-1]
    # As the plan writes it: the float 0.285 is less, so that 0.285 x 100 would be 28.
    share = Decimal(str(config.fraction)) * len(blocks)
    return Recompute(frozenset(blocks[: int(share.to_integral_value(ROUND_HALF_UP))]))
