"""What every part of a run holds between steps, by storage: the one list that reports and offload managers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sley_core.memory.state import PARTS, Part

if TYPE_CHECKING:
    import torch

    from sley_core.engine.store import GradientStore

Held = Callable[[], Iterable[tuple[str, Tensor]]]


class Holding(NamedTuple):
    """One piece of memory: a tensor over its whole storage, uint8 [bytes], and the names of all that lie in it."""

    memory: Tensor
    names: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return self.memory.untyped_storage().nbytes()


class Holdings:
    """The memory of one rank's run on `device`, by part. sources: what yields `(name, tensor)` of each part, asked anew each
    time: optimizers make their states late, and pools grow.

    A tensor that lies elsewhere (the step counts of AdamW, on the host) is nobody's holding, nor is one of dim 0 among the
    optimizer's states: a few bytes that would cost a copy each.
    """

    def __init__(
        self, device: torch.device, store: GradientStore, sources: Mapping[Part, Held], trim: Callable[[Part], int]
    ) -> None:
        self.device = device
        self.store = store
        self._sources = sources
        self._trim = trim

    def tensors(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of what `part` holds on the device, also while its memory is away."""
        for name, tensor in self._sources[part]():
            if tensor.device == self.device and not (part == "optimizer_states" and tensor.dim() == 0):
                yield name, tensor

    def pieces(self, part: Part) -> list[Holding]:
        """Returns the storages of `part`, each once; one that an earlier part of `PARTS` has too is that part's alone."""
        before = PARTS[: PARTS.index(part)]
        taken = {_key(tensor) for _, tensor in chain.from_iterable(map(self.tensors, before))}
        found: dict[int, tuple[Tensor, list[str]]] = {}
        for name, tensor in self.tensors(part):
            if (key := _key(tensor)) not in taken:
                found.setdefault(key, (tensor, []))[1].append(name)
        return [Holding(_whole(tensor), tuple(names)) for tensor, names in found.values()]

    def num_bytes(self, part: Part) -> int:
        """Returns the bytes of device memory that `part` has now; 0 while it is away."""
        return sum({_key(tensor): tensor.untyped_storage().nbytes() for _, tensor in self.tensors(part)}.values())

    def trim(self, part: Part) -> int:
        """Frees what `part`, "pools" or "messages", can allocate anew; returns the bytes."""
        return self._trim(part)


def _key(tensor: Tensor) -> int:
    """What identifies a storage, with or without memory."""
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: Tensor) -> Tensor:
    """Returns a view of the whole storage of `tensor`, uint8 [bytes]; it keeps its size while the memory is away."""
    import torch

    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())
