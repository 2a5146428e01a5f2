"""`powersgd.reducer`: sends gradients as low-rank approximations (see `low_rank`).

Two collectives per bucket: the first, of P and of all gradients not worth compressing, overlaps with the backward; the second,
of Q, runs at the step's end. A bucket is the gradients that became complete since the last one was sent. The state belongs to a
parameter, not to a bucket.

The algorithm is that of torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, against which it is tested. The README says
why that code itself is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.api.comm import Pending, SentBytes
from sley_core.api.model import derive
from sley_core.api.parts import FlatBuffer
from sley_core.protocols import GradientHandler
from sley_powersgd.low_rank import LowRank, as_matrix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sley_core.api.comm import Group
    from sley_core.api.parts import Param, Parts, StepState
    from sley_powersgd.config import PowerSGDConfig


@dataclass
class _Compressed:
    """Holds a gradient [n, m] of a bucket in flight, its state, and the factors [n, r] and [m, r] that are sent."""

    state: LowRank
    gradient: Tensor
    p: Tensor
    q: Tensor


@dataclass
class _Bucket:
    """Holds a bucket in flight. second: the buffer of all Q. whole: uncompressed gradients, each with its view in the sent
    buffer.
    """

    name: str
    group: Group
    second: FlatBuffer
    compressed: list[_Compressed]
    whole: list[tuple[Tensor, Tensor]]
    pending: Pending


class LowRankSums:
    """Sums gradients as approximations of at most `rank`, warm-started from one step to the next.

    seed: for the first factors; equal on all ranks. sent: counts the bytes that this rank sends.
    """

    def __init__(self, rank: int, error_feedback: bool, seed: int, sent: SentBytes) -> None:
        self.rank = rank
        self.error_feedback = error_feedback
        self.seed = seed
        self.sent = sent
        self.states: dict[Param, LowRank] = {}
        self._in_flight: list[_Bucket] = []

    def start(self, gradients: Mapping[Param, Tensor], group: Group, *, compress: bool = True) -> None:
        """Adds the errors to the gradients in place, and starts the all-reduce of P and of the uncompressed gradients. All
        ranks of `group` start the same buckets in one order. compress: else the sums of this bucket are exact.
        """
        matrices, whole = self._divide(gradients) if compress else ([], list(gradients.values()))
        some = next(iter(gradients.values()))
        shapes = [(matrix.shape[0], state.q.shape[1]) for matrix, state in matrices]
        first = FlatBuffer([*shapes, *(gradient.shape for gradient in whole)], some.dtype, some.device)
        second = FlatBuffer([state.q.shape for _, state in matrices], some.dtype, some.device)
        pairs = list(zip(whole, first.views[len(matrices) :], strict=True))
        compressed = [
            _Compressed(state, matrix, p, q) for (matrix, state), p, q in zip(matrices, first.views, second.views, strict=False)
        ]
        for each in compressed:
            each.state.project(each.gradient, each.p)
        for gradient, wire in pairs:
            wire.copy_(gradient)
        name = f"the bucket of {next(iter(gradients)).name}"
        pending = group.all_reduce(first.data, what=name)
        self.sent.add(first.data, group, passes=2)
        self._in_flight.append(_Bucket(name, group, second, compressed, pairs, pending))

    def finish(self) -> None:
        """Runs the second collectives and blocks until every gradient that was started holds its sum."""
        for bucket in self._in_flight:
            bucket.pending.wait()
            for gradient, wire in bucket.whole:
                gradient.copy_(wire)
            for each in bucket.compressed:
                each.state.expand(each.gradient, each.p, each.q)
            if bucket.compressed:
                # Over the bucket's reduce group, whose ranks get here for the same buckets in the same order.
                bucket.pending = bucket.group.all_reduce(bucket.second.data, what=bucket.name)
                self.sent.add(bucket.second.data, bucket.group, passes=2)
        for bucket in self._in_flight:
            bucket.pending.wait()
            for each in bucket.compressed:
                each.state.restore(each.gradient, each.p, each.q)
        self._in_flight.clear()

    def forget(self) -> None:
        """Waits for the collectives in flight and discards their results."""
        for bucket in self._in_flight:
            bucket.pending.wait()
        self._in_flight.clear()

    def keep(self, params: Iterable[Param]) -> None:
        """Drops the states of all other parameters: the error of a parameter is out of date after the parameter was frozen."""
        self.states = {param: self.states[param] for param in params if param in self.states}

    def _divide(self, gradients: Mapping[Param, Tensor]) -> tuple[list[tuple[Tensor, LowRank]], list[Tensor]]:
        """Returns the gradients to compress, as matrices with their states, and the others."""
        matrices, whole = [], []
        for param, gradient in gradients.items():
            matrix = as_matrix(gradient, self.rank)
            if matrix is None:
                whole.append(gradient)
                continue
            if param not in self.states:
                seed = derive(self.seed, "powersgd", param.name)
                self.states[param] = LowRank(matrix, self.rank, seed, self.error_feedback)
            matrices.append((matrix, self.states[param]))
        return matrices, whole


class PowerSGD(GradientHandler):
    """Computes exact sums before `start_step`, approximate ones from then on."""

    def __init__(self, config: PowerSGDConfig) -> None:
        self.config = config
        self._sent = SentBytes()
        self._filling: dict[str, dict[Param, Tensor]] = {}
        self._compresses = False

    def attach(self, parts: Parts) -> None:
        self._store, self._groups, self._book = parts.store, parts.groups, parts.registry
        self.sums = LowRankSums(self.config.rank, self.config.error_feedback, parts.run.seed, self._sent)

    def begin_step(self, step: StepState) -> None:
        """Discards what a failed step left in flight, and the states of parameters that are not trained; all states after a
        step that was not taken, because its gradients were not finite.
        """
        self.sums.forget()
        self._sent.begin_step()
        self._filling.clear()
        self.sums.keep(param for param in self._book if step.was_taken and param in self._store)
        self._compresses = step.step + 1 >= self.config.start_step

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Adds the gradient to the bucket of its reduce group, and starts the bucket's sum if it is full."""
        if self._groups[param.reduce_group].size == 1:
            return
        bucket = self._filling.setdefault(param.reduce_group, {})
        bucket[param] = self._store.gradient(param)
        if sum(gradient.nbytes for gradient in bucket.values()) >= self.config.bucket_mb * (1 << 20):
            self._start(param.reduce_group)

    def finish_step(self, step: StepState) -> None:
        for name in list(self._filling):
            self._start(name)
        self.sums.finish()
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the bytes that this rank sent in the last step."""
        return self._sent.counts()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the factor and, with feedback, the error of each compressed gradient: `<parameter>.q`, `<parameter>.error`."""
        for param, state in self.sums.states.items():
            yield f"{param.name}.q", state.q
            if state.error is not None:
                yield f"{param.name}.error", state.error

    def saved_state(self) -> dict[str, Tensor]:
        """Returns what `named_tensors` yields, for checkpoints: with it a resumed run computes the same approximations."""
        return dict(self.named_tensors())

    def restore_saved_state(self, kept: Mapping[str, Tensor]) -> None:
        """Restores what `saved_state` returned, for those parameters that had a state; the others start with a new one."""
        self.sums.states = {}
        for param in self._book:
            if (q := kept.get(f"{param.name}.q")) is not None:
                device, error = param.parameter.device, kept.get(f"{param.name}.error")
                self.sums.states[param] = LowRank.restored(q.to(device), None if error is None else error.to(device))

    def _start(self, reduce_group: str) -> None:
        # The store reports gradients in one order on all ranks of a reduce group, so their buckets are the same.
        self.sums.start(self._filling.pop(reduce_group), self._groups[reduce_group], compress=self._compresses)
