"""`dp.powersgd`: sends gradients as low-rank approximations (see `low_rank`).

Two collectives per bucket: the first, of P and of all gradients not worth compressing, overlaps with the backward; the second,
of Q, runs at the step's end. The state belongs to a parameter, not to a bucket, so a new layout loses nothing.

The algorithm is that of torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, against which it is tested; docs/adr says
why that code itself is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.api.comm import Pending, SentBytes, all_reduce
from sley_core.api.model import derive
from sley_core.api.parts import FlatBuffer
from sley_dp.low_rank import LowRank, as_matrix
from sley_dp.reducer import BucketReducer
from sley_dp.sums import Exact, Sums, described

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sley_core.api.comm import Group
    from sley_core.api.parts import Entry, GradientBuffer, Parts, StepState
    from sley_dp.config import PowerSGDConfig


@dataclass
class _Compressed:
    """Holds a gradient [n, m] of a bucket in flight, its state, and the factors [n, r] and [m, r] that are sent."""

    state: LowRank
    gradient: Tensor
    p: Tensor
    q: Tensor


@dataclass
class _Factors:
    """Holds a bucket between its two collectives. whole: uncompressed gradients, each with its view in the sent buffer."""

    buffer: GradientBuffer
    group: Group
    factors: FlatBuffer
    compressed: list[_Compressed]
    whole: list[tuple[Tensor, Tensor]]
    pending: Pending
    sent: SentBytes

    def expand(self) -> None:
        """Waits for the first collective and starts the second, of Q, unless nothing is compressed."""
        self.pending.wait()
        for gradient, wire in self.whole:
            gradient.copy_(wire)
        for one in self.compressed:
            one.state.expand(one.gradient, one.p, one.q)
        if not self.compressed:
            return
        # Over the bucket's reduce group, whose ranks get here for the same buckets in the same order.
        self.pending = all_reduce(self.factors.data, self.group, what=described(self.buffer))
        self.sent.add(self.factors.data, self.group, passes=2)

    def restore(self) -> None:
        """Waits for the second collective and writes the approximate sums into the gradients."""
        self.pending.wait()
        for one in self.compressed:
            one.state.restore(one.gradient, one.p, one.q)


class LowRankSums(Sums):
    """Sums gradients as approximations of at most `rank`, warm-started from one step to the next.

    seed: for the first factors; equal on all ranks.
    """

    def __init__(self, rank: int, error_feedback: bool, seed: int, sent: SentBytes) -> None:
        self.sent = sent
        self.rank = rank
        self.error_feedback = error_feedback
        self.seed = seed
        self._states: dict[Entry, LowRank] = {}
        self._under_way: list[_Factors] = []

    def keep(self, entries: Iterable[Entry]) -> None:
        """Drops the state of all other entries: a parameter's error is out of date after the parameter was frozen."""
        self._states = {entry: self._states[entry] for entry in entries if entry in self._states}

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the factor and, with feedback, the error of each compressed gradient: `<parameter>.q`, `<parameter>.error`."""
        for entry, state in self._states.items():
            yield f"{entry.name}.q", state.q
            if state.error is not None:
                yield f"{entry.name}.error", state.error

    def restore(self, kept: Mapping[str, Tensor], entries: Iterable[Entry]) -> None:
        """Restores what `held` yielded, for those of `entries` that had a state; the others start with a new one."""
        self._states = {}
        for entry in entries:
            if (q := kept.get(f"{entry.name}.q")) is not None:
                device, error = entry.parameter.device, kept.get(f"{entry.name}.error")
                self._states[entry] = LowRank.restored(q.to(device), None if error is None else error.to(device))

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Adds the errors to the gradients in place, and starts the all-reduce of P and the uncompressed gradients."""
        matrices, whole = self._divided(buffer)
        shapes = [(view.shape[0], state.q.shape[1]) for view, state in matrices]
        first = FlatBuffer([*shapes, *(view.shape for view in whole)], buffer.data.dtype, buffer.data.device)
        second = FlatBuffer([state.q.shape for _, state in matrices], buffer.data.dtype, buffer.data.device)
        compressed = [
            _Compressed(state, view, p, q)
            for (view, state), p, q in zip(matrices, first.views, second.views, strict=False)
        ]
        pairs = list(zip(whole, first.views[len(matrices) :], strict=True))
        for one in compressed:
            one.state.project(one.gradient, one.p)
        for gradient, wire in pairs:
            wire.copy_(gradient)
        # Over the bucket's reduce group, whose ranks start their buckets in one order.
        pending = all_reduce(first.data, group, what=described(buffer))
        self.sent.add(first.data, group, passes=2)
        self._under_way.append(_Factors(buffer, group, second, compressed, pairs, pending, self.sent))

    def finish(self) -> None:
        """Runs the second collectives and blocks until every started buffer holds its approximate sum."""
        for one in self._under_way:
            one.expand()
        for one in self._under_way:
            one.restore()
        self._under_way.clear()

    def forget(self) -> None:
        """Waits for the collectives in flight and discards their results."""
        for one in self._under_way:
            one.pending.wait()
        self._under_way.clear()

    def _divided(self, buffer: GradientBuffer) -> tuple[list[tuple[Tensor, LowRank]], list[Tensor]]:
        """Returns the gradients of `buffer` to compress, as matrices with their states, and the others."""
        matrices, whole = [], []
        for entry, view in zip(buffer.entries, buffer.views, strict=True):
            matrix = as_matrix(view, self.rank)
            if matrix is None:
                whole.append(view)
                continue
            if entry not in self._states:
                seed = derive(self.seed, "powersgd", entry.name)
                self._states[entry] = LowRank(matrix, self.rank, seed, self.error_feedback)
            matrices.append((matrix, self._states[entry]))
        return matrices, whole


class PowerSGD(BucketReducer):
    """Computes exact sums before `start_step`, approximate ones from then on."""

    def __init__(self, config: PowerSGDConfig) -> None:
        self.config = config
        self._sent = SentBytes()
        self._exact = Exact(self._sent)
        super().__init__(config, self._exact, self._sent)

    def attach(self, parts: Parts) -> None:
        """Makes the low-rank sums, with the run's seed, and lays the store out."""
        config = self.config
        self._low_rank = LowRankSums(config.rank, config.error_feedback, parts.run.seed, self._sent)
        super().attach(parts)

    def begin_step(self, step: StepState) -> None:
        """Chooses exact or low-rank sums for this step; resets the states after a skipped optimizer step."""
        super().begin_step(step)
        if not step.was_taken:
            self._low_rank.keep(())  # errors and factors of gradients that were not finite; on all ranks alike
        self.sums = self._low_rank if step.step + 1 >= self.config.start_step else self._exact

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that are kept from one step to the next, for code that offloads memory."""
        return self._low_rank.held()

    def kept(self) -> dict[str, Tensor]:
        """Returns the factors and errors too: with them a resumed run computes the same approximations."""
        return super().kept() | dict(self._low_rank.held())

    def restore_kept(self, kept: Mapping[str, Tensor]) -> None:
        super().restore_kept(kept)
        self._low_rank.restore(kept, self._parts.book)

    def laid_out(self) -> None:
        """Drops the states of entries that the store no longer has."""
        self._low_rank.keep(self._store.entries)
