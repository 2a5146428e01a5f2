"""What a layer keeps between its forward and its backward: everything, or its inputs only.

Recomputation is torch's non-reentrant checkpoint. The generators need no saving: the function that calls layers seeds
them before every layer, in recomputation as in the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from sley_core.engine.config import KeepConfig, RecomputeConfig
    from sley_core.protocols import ActivationPolicy


class Keep:
    """Autograd keeps what it needs."""

    def call(self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any]) -> Any:
        return layer(*args, **fields)


class Recompute:
    """The layers named in `names` keep their inputs and run again, once, when their backward needs them."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def call(self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any]) -> Any:
        if name not in self.names:
            return layer(*args, **fields)
        return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **fields)


def keep(config: KeepConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """`core.keep`."""
    return Keep()


def recompute(config: RecomputeConfig, layer_names: Sequence[str]) -> ActivationPolicy:
    """`core.recompute`: of `layer_names` (the whole model's, in order) the first round(fraction x blocks) blocks."""
    blocks = layer_names[1:-1]
    return Recompute(frozenset(blocks[: int(config.fraction * len(blocks) + 0.5)]))
