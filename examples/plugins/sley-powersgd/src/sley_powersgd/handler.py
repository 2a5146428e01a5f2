"""`powersgd.reducer`: sends gradients as the product of two thin matrices, a low-rank approximation.

Each bucket needs two collectives. The first one, of P and of all uncompressed gradients, overlaps with the backward. The second
one, of Q, runs at the end of the step. A bucket has the gradients that became complete since the previous bucket was sent. The
state belongs to a parameter, not to a bucket.

    project:  G <- G + error;  P = G Q             then P is summed over the ranks
    expand:   P <- orthonormal(P);  Q = G^T P      then Q is summed over the ranks
              error = G - P Q^T, before the sum
    restore:  G = P Q^T

Vogels, Karimireddy, Jaggi (2019), PowerSGD, algorithms 1 and 2. The sum of all ranks' gradients is projected onto the span of
P. This is one step of a power iteration, which starts from the previous step's result. Each rank keeps the residual of the
projection (the error) and adds it in the next step.

The algorithm is that of torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, and tests compare both. The README explains
why torch's code is not used.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sley_core.api.comm import Group, SentBytes, Work
from sley_core.api.model import derive_seed
from sley_core.api.parts import FlatBuffer, Param, Parts, StepState
from sley_core.protocols import GradientHandler
from sley_powersgd.plugin import PowerSGDConfig


@dataclass
class _Compressed:
    """Holds a gradient [n, m] of a bucket in flight, its state, and the factors [n, r] and [m, r] that are sent."""

    state: "LowRank"
    gradient: Tensor
    p: Tensor
    q: Tensor


@dataclass
class _Bucket:
    """Holds a bucket in flight. second: the buffer of all Q. uncompressed: the other gradients, each with its view in the
    sent buffer.
    """

    name: str
    group: Group
    second: FlatBuffer
    compressed: list[_Compressed]
    uncompressed: list[tuple[Tensor, Tensor]]
    pending: Work


class LowRankSums:
    """Sums gradients as approximations of at most `rank`, which start from the approximation of the previous step.

    seed: the seed of the first factors, equal on all ranks. sent: the counter of sent bytes.
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
        ranks of `group` must start the same buckets in the same order. compress: whether to compress this bucket.
        """
        matrices, uncompressed = self._divide(gradients) if compress else ([], list(gradients.values()))
        any_gradient = next(iter(gradients.values()))
        shapes = [(matrix.shape[0], state.q.shape[1]) for matrix, state in matrices]
        first = FlatBuffer([*shapes, *(gradient.shape for gradient in uncompressed)], any_gradient.dtype, any_gradient.device)
        second = FlatBuffer([state.q.shape for _, state in matrices], any_gradient.dtype, any_gradient.device)
        pairs = list(zip(uncompressed, first.views[len(matrices) :], strict=True))
        compressed = [
            _Compressed(state, matrix, p, q) for (matrix, state), p, q in zip(matrices, first.views, second.views, strict=False)
        ]
        for entry in compressed:
            entry.state.project(entry.gradient, entry.p)
        for gradient, sent in pairs:
            sent.copy_(gradient)
        name = f"the bucket of {next(iter(gradients)).name}"
        pending = group.all_reduce(first.data, label=name)
        self.sent.add(first.data, group, passes=2)
        self._in_flight.append(_Bucket(name, group, second, compressed, pairs, pending))

    def finish(self) -> None:
        """Runs the second collectives, and waits until every started gradient holds its sum."""
        for bucket in self._in_flight:
            bucket.pending.wait()
            for gradient, sent in bucket.uncompressed:
                gradient.copy_(sent)
            for entry in bucket.compressed:
                entry.state.expand(entry.gradient, entry.p, entry.q)
            if bucket.compressed:
                # All ranks of the bucket's reduce group make this call for the same buckets in the same order.
                bucket.pending = bucket.group.all_reduce(bucket.second.data, label=bucket.name)
                self.sent.add(bucket.second.data, bucket.group, passes=2)
        for bucket in self._in_flight:
            bucket.pending.wait()
            for entry in bucket.compressed:
                entry.state.restore(entry.gradient, entry.p, entry.q)
        self._in_flight.clear()

    def discard_in_flight(self) -> None:
        """Waits for the collectives in flight, and discards their results."""
        for bucket in self._in_flight:
            bucket.pending.wait()
        self._in_flight.clear()

    def retain_states(self, params: Iterable[Param]) -> None:
        """Drops the states of all parameters except `params`. The error of a parameter is outdated after the parameter was
        frozen.
        """
        self.states = {param: self.states[param] for param in params if param in self.states}

    def _divide(self, gradients: Mapping[Param, Tensor]) -> "tuple[list[tuple[Tensor, LowRank]], list[Tensor]]":
        """Returns the gradients to compress, as matrices with their states, and the uncompressed gradients."""
        matrices, uncompressed = [], []
        for param, gradient in gradients.items():
            matrix = view_as_matrix(gradient, self.rank)
            if matrix is None:
                uncompressed.append(gradient)
                continue
            if param not in self.states:
                seed = derive_seed(self.seed, "powersgd", param.name)
                self.states[param] = LowRank.create(matrix, self.rank, seed, self.error_feedback)
            matrices.append((matrix, self.states[param]))
        return matrices, uncompressed


class PowerSGD(GradientHandler):
    """Computes exact sums before `start_step` and approximate sums from then on."""

    def __init__(self, config: PowerSGDConfig) -> None:
        self.config = config
        self._sent = SentBytes()
        self._buckets: dict[str, dict[Param, Tensor]] = {}
        self._compresses = False

    def attach(self, parts: Parts) -> None:
        self._store, self._groups, self._registry = parts.store, parts.groups, parts.registry
        self.sums = LowRankSums(self.config.rank, self.config.error_feedback, parts.run.seed, self._sent)

    def begin_step(self, step: StepState) -> None:
        """Discards collectives of a failed step and the states of frozen parameters. After a step that was skipped for
        non-finite gradients, discards all states.
        """
        self.sums.discard_in_flight()
        self._sent.begin_step()
        self._buckets.clear()
        self.sums.retain_states(param for param in self._registry if step.was_taken and param in self._store)
        self._compresses = step.step + 1 >= self.config.start_step

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Adds the gradient to the bucket of its reduce group, and starts the bucket's sum if it is full."""
        if self._groups[param.reduce_group].size == 1:
            return
        bucket = self._buckets.setdefault(param.reduce_group, {})
        bucket[param] = self._store.gradient(param)
        if sum(gradient.nbytes for gradient in bucket.values()) >= self.config.bucket_mb * (1 << 20):
            self._start(param.reduce_group)

    def finish_step(self, step: StepState) -> None:
        for name in list(self._buckets):
            self._start(name)
        self.sums.finish()
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the number of bytes that this rank sent in the last step."""
        return self._sent.counts()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the factor and, with feedback, the error of each compressed gradient: `<parameter>.q`, `<parameter>.error`."""
        for param, state in self.sums.states.items():
            yield f"{param.name}.q", state.q
            if state.error is not None:
                yield f"{param.name}.error", state.error

    def saved_state(self) -> dict[str, Tensor]:
        """Returns the tensors of `named_tensors` for checkpoints, so that a resumed run computes the same approximations."""
        return dict(self.named_tensors())

    def restore_saved_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `saved_state`. Parameters without a state start with a new one."""
        self.sums.states = {}
        for param in self._registry:
            if (q := state.get(f"{param.name}.q")) is not None:
                device, error = param.parameter.device, state.get(f"{param.name}.error")
                self.sums.states[param] = LowRank(q.to(device), None if error is None else error.to(device))

    def _start(self, reduce_group: str) -> None:
        # The store reports gradients in one order on all ranks of a reduce group, so their buckets are the same.
        self.sums.start(self._buckets.pop(reduce_group), self._groups[reduce_group], compress=self._compresses)


MIN_RATE = 2
"""A gradient is compressed if its factors are at most 1 / MIN_RATE as large, as in torch's powerSGD_hook."""


def view_as_matrix(gradient: Tensor, rank: int) -> Tensor | None:
    """Returns `gradient` as a view [first dim, product of the other dims], or None if factors of `rank` columns would not be
    much smaller.
    """
    if gradient.ndim < 2:
        return None
    num_rows = gradient.shape[0]
    num_columns = gradient.shape[1:].numel()
    if (num_rows + num_columns) * min(rank, num_rows, num_columns) * MIN_RATE >= num_rows * num_columns:
        return None
    return gradient.view(num_rows, num_columns)


def orthonormal(columns: Tensor) -> Tensor:
    """Returns an orthonormal basis of the span of `columns`, with as many columns. QR returns a basis even for a zero gradient,
    from which the power iteration can recover. With Gram-Schmidt, zeros would stay zeros, and the parameter would never be
    trained again.
    """
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


@dataclass
class LowRank:
    """Holds the compression state of one gradient [n, m].

    q: [m, r], orthonormal, equal on all ranks, with r at most `rank`. error: [n, m], the error of this rank, or None without
    feedback.
    """

    q: Tensor
    error: Tensor | None

    @classmethod
    def create(cls, gradient: Tensor, rank: int, seed: int, error_feedback: bool) -> "LowRank":
        """Returns the state before the first step: a random factor, and no error."""
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(gradient.shape[1], min(rank, *gradient.shape), generator=generator, dtype=gradient.dtype)
        return cls(orthonormal(start.to(gradient.device)), torch.zeros_like(gradient) if error_feedback else None)

    def project(self, gradient: Tensor, p: Tensor) -> None:
        """Adds the error to `gradient`, in place, and writes `gradient` q to `p` [n, r]."""
        if self.error is not None:
            gradient.add_(self.error)
        torch.mm(gradient, self.q, out=p)

    def expand(self, gradient: Tensor, p: Tensor, q: Tensor) -> None:
        """Orthonormalizes the summed `p` in place, writes `gradient`^T p to `q` [m, r], and updates the error."""
        p.copy_(orthonormal(p))
        torch.mm(gradient.T, p, out=q)
        if self.error is not None:
            torch.addmm(gradient, p, q.T, alpha=-1, out=self.error)

    def restore(self, gradient: Tensor, p: Tensor, q: Tensor) -> None:
        """Writes the approximation p q^T of the summed gradient to `gradient`. `p` and `q` are sums over ranks. Stores q for
        the next step.
        """
        torch.mm(p, q.T, out=gradient)
        self.q = orthonormal(q)
