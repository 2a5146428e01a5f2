"""All-gathers weights of which every rank has stepped a part, during the next forward.

update | gathers start, the first layer's first | layer 0 waits for its buckets | layer 1 ... | finish, before the next update
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sley_dp.shard_groups import WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.comm import Groups, Work
    from sley_core.api.parts import Cut, WeightBuffer


class WeightGathers:
    """Gathers `buffers`, each in place, over the ranks of its cut; `parts.weights` asks for it (`Completion`).

    buffers: in the order in which forwards need them, the same on all ranks of a cut.
    """

    def __init__(self, buffers: Sequence[tuple[WeightBuffer, Cut]], groups: Groups) -> None:
        self.buffers = buffers
        self._groups = groups
        self._under_way: dict[int, Work] = {}
        self._leaving: list[Work] = []

    def start(self) -> None:
        """Starts to gather every buffer; this rank's part must not be written until `finish`."""
        self.finish()
        for at, (buffer, cut) in enumerate(self.buffers):
            # Over the ranks that share a copy, on a separate lane, after the same updates, in the order of `buffers`.
            transport = self._groups[cut.axis].transport(WEIGHTS)
            what = f"the weights from {buffer.entries[0].name} on"
            self._under_way[at] = transport.all_gather([buffer.data], [own_part(buffer, cut)], what=what)

    def is_due(self, numbers: Iterable[int]) -> bool:
        """Returns whether `wait_for` would wait; depends only on the calls so far, so it is the same on all ranks that make the
        same calls.
        """
        return any(at in self._under_way for at in numbers)

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Blocks until the buffers with these numbers are complete."""
        for at in numbers:
            work = self._under_way.pop(at, None)
            if work is not None:
                work.wait()
                self._leaving.append(work)

    def wait(self) -> None:
        """Blocks until all buffers are complete."""
        self.wait_for(range(len(self.buffers)))

    def finish(self) -> None:
        """Blocks until all buffers are complete and no other rank reads from them any more."""
        self.wait()
        for work in self._leaving:
            work.wait_sent()
        self._leaving.clear()


def own_part(buffer: WeightBuffer, cut: Cut) -> Tensor:
    """Returns the part of the buffer that this rank steps, flat: a view."""
    first, last = cut.bounds(buffer.data.numel())
    return buffer.data[first:last]
