"""Working weights as views of flat buffers, and the completion of those that other ranks have stepped.

    lay_out ──> adopt: values move in, masters are made ──> updated: ranks have stepped their parts ──> settle ─┐
                                                               ^                                               │
                                                               └───────────────────────────────────────────────┘

Weights lie in buffers only if a part of the run asks for it: `torch.save` of one such parameter saves its whole buffer, unless
it is cloned. Only this module sets a parameter's `.data`, when masters are made; tied modules keep one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor, nn

from sley_core.comm.copies import free, grow
from sley_core.engine.book import Entry
from sley_core.engine.buffers import ALIGNMENT, FlatBuffer
from sley_core.errors import RunError
from sley_core.model.formats import is_kept, parameter_format


class WeightBuffer(FlatBuffer):
    """Holds the working weights of `entries`, side by side; the buffer divides into `num_parts` equal parts.

    Each entry has the same offset as its gradient in a gradient buffer of the same entries that is cut into as many parts. It
    has no memory until `build`, which the store calls for the first value that moves in, so one buffer at a time is there
    beside the values as they were made. Who reads or writes it before ends the process (`comm.copies.free`).
    """

    def __init__(self, entries: Sequence[Entry], dtype: torch.dtype, num_parts: int) -> None:
        shapes = [entry.parameter.shape for entry in entries]
        device = entries[0].parameter.device
        super().__init__(shapes, dtype, device, alignment=ALIGNMENT, multiple=num_parts)
        self.entries = list(entries)
        self._num_freed = free(self.data)  # 0 once it has memory

    def build(self) -> None:
        """Allocates the buffer, zeroed, unless it has memory."""
        if self._num_freed:
            grow(self.data, self._num_freed)
            self.data.zero_()
            self._num_freed = 0


class Completion(Protocol):
    """Fetches the parts of weights that other ranks step.

    start ──> wait (by layer, or for all) ──> finish
    """

    def start(self) -> None:
        """Starts the exchange; called when this rank has stepped its own parts. All ranks call it."""

    def wait(self) -> None:
        """Blocks until all weights are those of the last step. Depends on nothing that another rank does after its `start`."""

    def finish(self) -> None:
        """Does as `wait`, and also waits until no other rank reads this rank's weights any more, so that they may be
        written.
        """


class WeightStore:
    """Holds the places of working weights, of dtype `dtype` but for those that a pattern of `keep` names, in fp32.

    is_eager: whether `updated` also waits; else weights arrive while the next step runs, each before its layer is called.
    """

    def __init__(self, dtype: torch.dtype, keep: Sequence[str] = ()) -> None:
        self.dtype = dtype
        self.keep = keep
        self.buffers: list[WeightBuffer] = []
        self.is_eager = False
        self._places: dict[Entry, tuple[WeightBuffer, Tensor]] = {}
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._completions: list[Completion] = []
        self._is_laid_out = False

    def lay_out(self, lists: Iterable[tuple[Sequence[Entry], int]]) -> list[WeightBuffer]:
        """Makes a buffer for each list of entries, which divides into the given number of parts; returns these buffers, which
        have no memory before masters are made: who attaches must not read or write them.

        Called by what is attached before masters are made, as gradient handlers are. An entry has one place at most.
        """
        assert not self._is_laid_out, "weights are laid out before masters are made"
        made = [WeightBuffer(entries, self.dtype, num_parts) for entries, num_parts in lists]
        for buffer in made:
            assert not any(is_kept(entry.name, self.keep) for entry in buffer.entries), "buffers have one dtype"
            twice = [entry.name for entry in buffer.entries if entry in self._places]
            assert not twice, f"{twice} have a place already"
            self._places |= {entry: (buffer, view) for entry, view in zip(buffer.entries, buffer.views, strict=True)}
        self.buffers += made
        return made

    def __contains__(self, entry: Entry) -> bool:
        """Whether the entry's working weight lies in one of the buffers."""
        return entry in self._places

    def dtype_of(self, entry: Entry) -> torch.dtype:
        """Returns the dtype of the entry's working weight."""
        return parameter_format(entry.name, self.dtype, self.keep)

    def adopt(self, entry: Entry) -> None:
        """Moves the entry's value, rounded to its dtype, to its place; without a place it is rounded where it is.

        The weight is contiguous afterwards: fused optimizers read weight, gradient and states in the order of memory, whatever
        their strides, and buffers of gradients are contiguous.
        """
        self._is_laid_out = True
        parameter = entry.parameter
        if entry not in self._places:
            dtype = self.dtype_of(entry)
            if parameter.dtype != dtype or not parameter.is_contiguous():
                parameter.data = parameter.detach().to(dtype).contiguous()
            return
        buffer, place = self._places[entry]
        buffer.build()
        place.copy_(parameter.detach())
        parameter.data = place
        if place.numel():
            self._held.append((parameter, place))

    @torch.no_grad()
    def hold(self) -> None:
        """Moves the values of parameters that a program pointed elsewhere (`parameter.data = `) back to their places."""
        for parameter, place in self._elsewhere():
            value = parameter.detach()
            parameter.data = place
            parameter.copy_(value)  # increments its version counter, by which masters notice the write

    @property
    def are_in_place(self) -> bool:
        """Whether no parameter was pointed elsewhere since `hold`; works while memory is away."""
        return next(self._elsewhere(), None) is None

    def _elsewhere(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields the parameters that are not in their places, with these; addresses would not do, which change with moves."""
        for parameter, place in self._held:
            if _memory(parameter) != _memory(place):
                yield parameter, place

    def completed_by(self, completion: Completion) -> None:
        """Registers what fetches the parts that other ranks step; called by what is attached before masters are made."""
        self._completions.append(completion)

    @property
    def come_late(self) -> bool:
        """Whether weights may still be in flight when a step returns; the same on all ranks."""
        return bool(self._completions) and not self.is_eager

    def updated(self) -> None:
        """Starts the completions; called when this rank has stepped its parts. All ranks call it."""
        for one in self._completions:
            one.start()
        if self.is_eager:
            self.settle()

    def settle(self) -> None:
        """Blocks until all weights of this rank are those of the last step, and may be written. All ranks call it.

        Called before control returns to a program; between two steps of one call it is not needed.
        """
        for one in self._completions:
            one.finish()

    @contextmanager
    def settled_on_error(self) -> Iterator[None]:
        """Returns a context manager that waits for complete weights if its block raises, as far as the other ranks still
        answer.
        """
        try:
            yield
        except BaseException:
            for one in self._completions:
                with suppress(RunError):
                    one.wait()
            raise


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Returns storage and place in it: the same while memory is away, and for fake tensors, which `is_set_to` does not take."""
    storage: int = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset())
