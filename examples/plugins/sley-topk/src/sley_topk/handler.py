"""`topk.reducer`: top-k sums with error feedback (Stich et al. 2018; Lin et al. 2018, Deep Gradient Compression)."""

from collections.abc import Iterator, Mapping
from math import ceil

import torch
from torch import Tensor

from sley_core.api.comm import Group, SentBytes, Work
from sley_core.api.parts import Param, Parts, StepState
from sley_core.protocols import GradientHandler
from sley_topk.plugin import TopKConfig


class TopK(GradientHandler):
    """Adds the error to the gradient, sends its largest elements, and keeps the other elements as the new error.

    There is an error per parameter, as large as the gradient. A failed step changes no error. After a step that was skipped
    for non-finite gradients, all errors are dropped.
    """

    def __init__(self, config: TopKConfig) -> None:
        self.config = config
        self._errors: dict[str, Tensor] = {}
        self._sparse: dict[str, SparseSum] = {}
        self._dense: list[Work] = []
        self._sent = SentBytes()

    def attach(self, parts: Parts) -> None:
        self._store, self._groups, self._registry = parts.store, parts.groups, parts.registry

    def begin_step(self, step: StepState) -> None:
        self._sent.begin_step()
        self._wait_and_clear()  # the state of a failed step
        trained = {param.name for param in self._registry if param in self._store}
        if not step.was_taken:
            trained = set()  # drops errors of non-finite gradients, on all ranks
        self._errors = {name: error for name, error in self._errors.items() if name in trained}

    def gradient_ready(self, param: Param, step: StepState) -> None:
        group = self._groups[param.reduce_group]
        if group.size == 1:
            return
        gradient = self._store.gradient(param)
        if not self._is_sparse(param):
            # This is the parameter's reduce group. The store reports parameters in the same order on all of its ranks.
            self._dense.append(group.all_reduce(gradient, label=param.name))
            self._sent.add(gradient, group, passes=2)
            return
        if param.name in self._errors:
            gradient += self._errors[param.name].view_as(gradient)
        self._sparse[param.name] = SparseSum(gradient, self.config.ratio, group, self._sent, param.name)

    def finish_step(self, step: StepState) -> None:
        for sparse in self._sparse.values():
            sparse.wait()  # before any error changes, so that a failed step changes none
        for name, sparse in self._sparse.items():
            if name not in self._errors:
                self._errors[name] = torch.empty_like(self._store.gradient(self._registry[name])).view(-1)
            sparse.finish(self._errors[name])
        self._sparse.clear()
        self._wait_and_clear()
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the number of bytes that this rank sent in the last step."""
        return self._sent.counts()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the errors for memory managers."""
        yield from self._errors.items()

    def saved_state(self) -> Mapping[str, Tensor]:
        """Returns the errors by parameter name for checkpoints, so that a resumed run computes the same sums."""
        return dict(self._errors)

    def restore_saved_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `saved_state`."""
        params = {param.name: param for param in self._registry if param in self._store}
        self._errors = {
            name: error.to(params[name].parameter.device, copy=True) for name, error in state.items() if name in params
        }

    def _is_sparse(self, param: Param) -> bool:
        return param.numel >= max(1, self.config.min_numel)

    def _wait_and_clear(self) -> None:
        """Waits for all collectives in flight, and drops them."""
        for sparse in self._sparse.values():
            sparse.wait()
        for dense in self._dense:
            dense.wait()
        self._sparse.clear()
        self._dense.clear()


class SparseSum:
    """Sums the largest elements, `ratio` of each rank's `gradient` [...], over `group`.

    The exchange starts at once. `gradient` is only read until `finish`. name: the name of the parameter for errors. All ranks
    of `group` must create their sums in the same order.
    """

    def __init__(self, gradient: Tensor, ratio: float, group: Group, sent: SentBytes, name: str) -> None:
        self._flat = gradient.view(-1)
        count = ceil(ratio * gradient.numel())
        indices = torch.topk(self._flat.abs(), count, sorted=False).indices
        self._values = gradient.new_empty(group.size, count)
        self._indices = indices.new_empty(group.size, count)
        self._local_indices = indices
        self._pending: list[Work] = []
        # A collective of the parameter's reduce group, whose ranks send the same numbers of elements, values first.
        for gathered, local, label in ((self._values, self._flat[indices], "values"), (self._indices, indices, "indices")):
            self._pending.append(group.all_gather(gathered, local[None], label=f"{label} of {name}"))
            sent.add(gathered, group, passes=1)

    def wait(self) -> None:
        """Waits for the elements of all ranks."""
        for pending in self._pending:
            pending.wait()

    def finish(self, error: Tensor) -> None:
        """Waits, and writes the omitted elements of this rank into `error` [numel] and the sum into the gradient. All ranks get
        the same bits, since they add the elements of ranks in the same order, and the elements of a rank have different
        positions.
        """
        self.wait()
        error.copy_(self._flat)
        error[self._local_indices] = 0
        self._flat.zero_()
        for values, indices in zip(self._values, self._indices, strict=True):
            self._flat.index_add_(0, indices, values)
