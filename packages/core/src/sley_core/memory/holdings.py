"""What every part of a run holds between steps, by storage: the one list that reports and offload managers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sley_core.memory.state import PARTS, Part

if TYPE_CHECKING:
    import torch

    from sley_core.engine.masters import Stepped
    from sley_core.engine.store import GradientStore

Held = Callable[[], Iterable[tuple[str, Tensor]]]


class Holding(NamedTuple):
    """One piece of memory, which is here: a tensor over its whole storage, uint8 [bytes], and what lies in it, by name."""

    memory: Tensor
    tensors: dict[str, Tensor]


class Holdings:
    """The memory of one rank's run on `device`, by part. sources: what yields `(name, tensor)` of each part, asked anew each
    time: optimizers make their states late, and pools grow.

    A tensor that lies elsewhere (the step counts of AdamW, on the host) is nobody's holding, nor is one of dim 0 among the
    optimizer's states: a few bytes that would cost a copy each.
    """

    def __init__(
        self,
        device: torch.device,
        store: GradientStore,
        sources: Mapping[Part, Held],
        states_of: Callable[[Stepped], Iterable[tuple[str, Tensor]]],
        trim: Callable[[Part], int],
    ) -> None:
        self.device = device
        self.store = store
        self._sources = sources
        self._states_of = states_of
        self._trim = trim

    def tensors(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of what `part` holds on the device, also while its memory is away."""
        for name, tensor in self._sources[part]():
            if self._is_state(tensor) if part == "optimizer_states" else tensor.device == self.device:
                yield name, tensor

    def pieces(self, part: Part) -> list[Holding]:
        """Returns the storages of `part`, each once; one that an earlier part of `PARTS` has too is that part's alone."""
        before = PARTS[: PARTS.index(part)]
        taken = {_key(tensor) for _, tensor in chain.from_iterable(map(self.tensors, before))}
        return [one for one in pieces_of(self.tensors(part)) if _key(one.memory) not in taken]

    def states_of(self, stepped: Stepped) -> list[Holding]:
        """Returns the storages of the optimizer's states for one parameter; none before its first step."""
        return pieces_of((name, state) for name, state in self._states_of(stepped) if self._is_state(state))

    def num_bytes(self, part: Part) -> int:
        """Returns the bytes of device memory that `part` has now; 0 while it is away."""
        return sum({_key(tensor): tensor.untyped_storage().nbytes() for _, tensor in self.tensors(part)}.values())

    def trim(self, part: Part) -> int:
        """Frees what `part`, "pools" or "messages", can allocate anew; returns the bytes."""
        return self._trim(part)

    def _is_state(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and tensor.dim() > 0


def pieces_of(tensors: Iterable[tuple[str, Tensor]]) -> list[Holding]:
    """Returns the storages of `tensors`, each once."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        found.setdefault(_key(tensor), {})[name] = tensor
    return [Holding(_whole(next(iter(inside.values()))), inside) for inside in found.values()]


def _key(tensor: Tensor) -> int:
    """What identifies a storage, with or without memory."""
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: Tensor) -> Tensor:
    """Returns a view of the whole storage of `tensor`, uint8 [bytes]; it keeps its size while the memory is away."""
    import torch

    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())
