"""Keeps optimizer states on the device only while their own weights are stepped.

    tail of the backward    update of 0      update of 1                  update of 2      next forward
    0 comes ............... 1 comes ........ 0 leaves, 2 comes .......... 1 leaves ....... 2 leaves

At most two buckets are on the device at once, one that is stepped and one in flight; so the device needs memory for two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sley_core.api.memory import Holding, Moved, Where, storage_id
from sley_core.api.parts import split_by_size
from sley_memory.offload.parked import Parked, Streams, packed

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.memory import Holdings, Stepped
    from sley_core.api.parts import Param, Parts
    from sley_memory.offload.arena import Arena


def by_bytes(stepped: Iterable[Stepped], num_bytes: int) -> list[list[Stepped]]:
    """Returns `stepped` in runs of at most `num_bytes` of parameters; a larger one is alone."""
    return split_by_size(stepped, lambda param: param.parameter.numel() * param.parameter.element_size(), num_bytes)


class BetweenSteps:
    """Steps the optimizer bucket by bucket, with only the bucket's states on the device; registers itself with the run's step.

    bucket_bytes: of the parameters that are stepped together; AdamW's states are twice as large.
    """

    def __init__(
        self, holdings: Holdings, parts: Parts, streams: Streams, arena: Arena, bucket_bytes: int, moved: Moved
    ) -> None:
        self._holdings = holdings
        self._streams = streams
        self._arena = arena
        self._bucket_bytes = bucket_bytes
        self._moved = moved
        self._buckets: list[tuple[list[Stepped], Parked]] = []
        self._is_first = False
        parts.events.step_in_buckets = self._step
        parts.events.began.append(self._began)
        parts.events.after_update.append(self._leave)
        parts.store.on_ready.append(self._gradient_ready)

    @property
    def where(self) -> Where:
        """Returns where the states are: away, between two steps; else where the first bucket is that is not away."""
        return next((one.where for _, one in self._buckets if one.where is not Where.AWAY), Where.AWAY)

    def offload(self) -> None:
        """Does nothing but count the call: the states are away."""
        self._moved.num_no_ops += 1

    def onload(self) -> None:
        """Does nothing but count the call: the states come when their weights are stepped."""
        self._moved.num_no_ops += 1

    def require(self) -> None: ...

    def wait(self) -> None:
        """Waits for copies that are still on their way to the host."""
        for _, parked in self._buckets:
            parked.wait()

    def host(self) -> Mapping[int, Tensor]:
        """Waits for copies to the host; returns those of the states of all buckets, by `storage_id`, uint8 [bytes]."""
        return {key: copy for _, parked in self._buckets for key, copy in parked.host().items()}

    def _began(self) -> None:
        """Sends away what a failed step left on the device; the next gradient is the step's first."""
        self._leave()
        self._is_first = True

    def _gradient_ready(self, _entry: Param) -> None:
        """Starts to bring the first bucket at the step's first gradient, while the rest of the backward runs."""
        if self._is_first:
            self._is_first = False
            self._come(0)

    def _step(self, stepped: Sequence[Stepped]) -> Iterator[Sequence[Stepped]]:
        """Yields each bucket of weights to be stepped, once its states are on the device; meanwhile the next one's come, and
        afterwards its own leave.
        """
        self._plan(stepped)
        self._come(0)
        for at, (bucket, parked) in enumerate(self._buckets):
            self._come(at + 1)
            parked.require()
            yield bucket
            parked.offload()

    def _come(self, at: int) -> None:
        """Starts to bring the states of bucket number `at`, if there is one and they are away."""
        if at < len(self._buckets) and self._buckets[at][1].where in (Where.LEAVING, Where.AWAY):
            self._buckets[at][1].onload()

    def _leave(self) -> None:
        """Sends away the states of all buckets that are here or coming."""
        for _, parked in self._buckets:
            if parked.where in (Where.HERE, Where.COMING):
                parked.offload()

    def _plan(self, stepped: Sequence[Stepped]) -> None:
        """Adds buckets for weights that are not in one yet: all in the first step, later those that were unfrozen."""
        known = {id(one.parameter) for bucket, _ in self._buckets for one in bucket}
        new = by_bytes([one for one in stepped if id(one.parameter) not in known], self._bucket_bytes)
        for bucket in new:
            states = self._states(bucket)
            # They have been stepped: nobody need ask whether they have changed, and hold up the host for it.
            parked = Parked(states, self._streams, self._arena, self._bucket_bytes, self._moved, makes_room=False)
            self._buckets.append((bucket, parked))

    def _states(self, bucket: Sequence[Stepped]) -> Callable[[], list[Holding]]:
        """Returns a function that lists the states of a bucket's weights, small ones laid together: those whose storages
        nothing else uses, so that they can leave while other weights are stepped.
        """
        known: set[int] = set()
        shared: set[int] = set()

        def own() -> list[Holding]:
            """Lists them; looks again for storages that others use where some are new: in the first step, and once a program
            has loaded states.
            """
            found = self._holdings.states_of(bucket)
            keys = {storage_id(piece.memory) for piece in found}
            if not keys <= known:  # new in the first step, and where a program has loaded states
                shared.update(keys & self._holdings.shared_with(bucket))
                known.clear()
                known.update(keys)
            mine = packed([piece for piece in found if storage_id(piece.memory) not in shared], self._bucket_bytes)
            known.update(storage_id(piece.memory) for piece in mine)
            return mine

        return own
