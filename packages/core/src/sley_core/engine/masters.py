"""The weights that the optimizer steps: the parameters themselves, or fp32 masters of narrower ones.

A bf16 weight of 1.0 cannot take an update of 0.001; its master can, and the working weight follows when enough have come
together. What a gradient is accumulated in is the store's business and does not depend on the weights' type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sley_core.engine.book import Entry
from sley_core.engine.flat import FlatBuffer
from sley_core.engine.store import GradientStore


@dataclass(frozen=True)
class Stepped:
    """What the optimizer steps for one entry: `parameter`, whose gradient is the entry's slot in the store."""

    entry: Entry
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def decays(self) -> bool:
        return self.entry.decays


class Masters:
    """What the optimizer steps for each entry, in the order in which entries were added.

    dtype: of the working weights. wide: of what is stepped; where it is the same, that is the parameters themselves.
    Else parameters are narrowed to `dtype`, and what they were stays, in one flat buffer for each call of `add`.
    """

    def __init__(self, dtype: torch.dtype, wide: torch.dtype) -> None:
        self.dtype = dtype
        self.wide = wide
        self.stepped: list[Stepped] = []
        self._flats: list[FlatBuffer] = []
        self._masters: list[Tensor] = []
        self._working: list[Tensor] = []

    def add(self, entries: Sequence[Entry]) -> list[Stepped]:
        """Takes charge of `entries`; returns what the optimizer steps for them."""
        if self.wide == self.dtype:
            added = [Stepped(entry, entry.parameter) for entry in entries]
        else:
            added = self._narrowed(entries) if entries else []
        self.stepped += added
        return added

    @property
    def num_bytes(self) -> int:
        """Bytes of the masters; 0 where the parameters are stepped directly."""
        return sum(flat.num_bytes for flat in self._flats)

    def take_gradients(self, store: GradientStore) -> None:
        """`grad` of what is stepped becomes the entry's slot, a view and no copy; None while the entry is frozen."""
        for stepped in self.stepped:
            stepped.parameter.grad = store.gradient(stepped.entry) if stepped.entry in store else None

    def write_back(self) -> None:
        """The working weights become their masters, rounded; masters let go of the store's views."""
        if self._working:
            torch._foreach_copy_(self._working, self._masters)
            for stepped in self.stepped:
                stepped.parameter.grad = None

    def _narrowed(self, entries: Sequence[Entry]) -> list[Stepped]:
        flat = FlatBuffer([entry.parameter.shape for entry in entries], self.wide, entries[0].parameter.device)
        self._flats.append(flat)
        narrowed = []
        for entry, view in zip(entries, flat.views, strict=True):
            working = entry.parameter
            view.copy_(working.detach())
            working.data = working.detach().to(self.dtype)
            self._masters.append(view)
            self._working.append(working.detach())
            narrowed.append(Stepped(entry, nn.Parameter(view)))
        return narrowed
