"""Every parameter once: its name, its shape, who holds it, who must still sum its gradient.

Norm, clip, counts, checkpoints, offload and reports walk the book, never `module.parameters()`: a tied weight counts once,
names do not depend on the layout, and nothing is hung on tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from sley_core.model.layers import Layer

NORM_CLASSES = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


@dataclass(frozen=True)
class Holder:
    """A place that holds a parameter: attribute `attribute` of `module`, which stands in model chunk `chunk`."""

    module: nn.Module
    attribute: str
    chunk: int


@dataclass(eq=False)
class Entry:
    """One logical parameter.

    name: the name under which the first layer that holds it knows it, e.g. `blocks.0.attention.q.weight`.
    shape: of the whole parameter, in every layout. aliases: its other names (ties).
    decays: whether weight decay applies (matrices do; norms, biases and other vectors do not).
    reduce_group: the axis over which its accumulated gradient is still a partial sum.
    """

    name: str
    shape: tuple[int, ...]
    holders: list[Holder]
    aliases: list[str] = field(default_factory=list)
    decays: bool = True
    reduce_group: str = "stage"
    index: int = 0

    @property
    def parameter(self) -> nn.Parameter:
        """The live parameter: looked up, since materialising and moving replace the object."""
        holder = self.holders[0]
        parameter = getattr(holder.module, holder.attribute)
        assert isinstance(parameter, nn.Parameter), f"{self.name} is a {type(parameter).__name__}"
        return parameter

    @property
    def chunks(self) -> frozenset[int]:
        return frozenset(holder.chunk for holder in self.holders)

    @property
    def numel(self) -> int:
        return self.parameter.numel()

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad

    def __repr__(self) -> str:
        return f"Entry({self.name}, {list(self.shape)}, {self.reduce_group})"


class ParameterBook:
    """The entries of this rank's layers, in the order in which the model names them.

    chunks: this rank's layers, per model chunk.
    """

    def __init__(self, chunks: Sequence[Sequence[Layer]]) -> None:
        self.entries: list[Entry] = []
        known: dict[int, Entry] = {}
        for chunk, layers in enumerate(chunks):
            for layer in layers:
                for name, holder in _held(layer, chunk):
                    parameter = getattr(holder.module, holder.attribute)
                    entry = known.get(id(parameter))
                    if entry is None:
                        entry = known[id(parameter)] = Entry(name, tuple(parameter.shape), [], index=len(self.entries))
                        entry.decays = parameter.ndim >= 2 and not is_norm(holder.module)
                        self.entries.append(entry)
                    else:
                        entry.aliases.append(name)
                    entry.holders.append(holder)
        self._by_name = {name: entry for entry in self.entries for name in (entry.name, *entry.aliases)}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Entry:
        """The entry of any of a parameter's names."""
        return self._by_name[name]

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    @property
    def trainable(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.trainable]

    @property
    def num_parameters(self) -> int:
        """Elements on this rank; a tied weight counts once."""
        return sum(entry.numel for entry in self.entries)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` normalises: one of torch's classes, or named so (`LlamaRMSNorm`, `MyLayerNorm`)."""
    return isinstance(module, NORM_CLASSES) or type(module).__name__.lower().endswith("norm")


def _held(layer: Layer, chunk: int) -> Iterator[tuple[str, Holder]]:
    for prefix, module in layer.module.named_modules(prefix=layer.name, remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            del parameter
            yield f"{prefix}.{attribute}", Holder(module, attribute, chunk)
