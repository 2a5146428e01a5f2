"""`topk.reducer`: top-k sums with error feedback (Stich et al. 2018; Lin et al. 2018, Deep Gradient Compression)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import Pending, SentBytes
from sley_core.protocols import GradientHandler
from sley_topk.config import TopKConfig
from sley_topk.sparse import SparseSum

if TYPE_CHECKING:
    from sley_core.api.parts import Param, Parts, StepState

INDEX_BYTES = 8
"""Of an element's place, int64."""


class TopK(GradientHandler):
    """Each rank adds what it left out before to its gradient, sends the largest elements of that, and keeps the rest.

    What it keeps, an error per parameter, is as large as the gradient. A step that fails changes none of it; after a step that
    was not taken, for want of finite numbers, all of it is dropped.
    """

    def __init__(self, config: TopKConfig) -> None:
        self.config = config
        self._errors: dict[str, Tensor] = {}
        self._sparse: dict[str, SparseSum] = {}
        self._dense: list[Pending] = []
        self._sent = SentBytes()

    def attach(self, parts: Parts) -> None:
        self._store, self._groups, self._book = parts.store, parts.groups, parts.registry

    def begin_step(self, step: StepState) -> None:
        self._sent.begin_step()
        self._end()  # what a failed step has left
        trained = {param.name for param in self._book if param in self._store}
        if not step.was_taken:
            trained = set()  # errors of gradients that were not finite; on all ranks alike
        self._errors = {name: error for name, error in self._errors.items() if name in trained}

    def gradient_ready(self, param: Param, step: StepState) -> None:
        group = self._groups[param.reduce_group]
        if group.size == 1:
            return
        gradient = self._store.gradient(param)
        if not self._is_sparse(param):
            # The parameter's reduce group; the store reports parameters in one order on all of its ranks.
            self._dense.append(group.all_reduce(gradient, what=param.name))
            self._sent.add(gradient, group, passes=2)
            return
        if param.name in self._errors:
            gradient += self._errors[param.name].view_as(gradient)
        self._sparse[param.name] = SparseSum(gradient, self.config.ratio, group, self._sent, param.name)

    def finish_step(self, step: StepState) -> None:
        for one in self._sparse.values():
            one.wait()  # for all of them, before any error changes: a step that fails changes none
        for name, one in self._sparse.items():
            if name not in self._errors:
                self._errors[name] = torch.empty_like(self._store.gradient(self._book[name])).view(-1)
            one.finish(self._errors[name])
        self._sparse.clear()
        self._end()
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the bytes that a step sends."""
        return self._sent.counts()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the errors, for those who move memory."""
        yield from self._errors.items()

    def saved_state(self) -> Mapping[str, Tensor]:
        """Returns the errors by the parameters' names, for checkpoints: with them the next sums are as if nothing had been."""
        return dict(self._errors)

    def restore_saved_state(self, kept: Mapping[str, Tensor]) -> None:
        """Takes what `saved_state` returned."""
        params = {param.name: param for param in self._book if param in self._store}
        self._errors = {
            name: error.to(params[name].parameter.device, copy=True) for name, error in kept.items() if name in params
        }

    def _is_sparse(self, param: Param) -> bool:
        return param.numel >= max(1, self.config.min_numel)

    def _end(self) -> None:
        """Waits for everything that is under way, and forgets it."""
        for sparse in self._sparse.values():
            sparse.wait()
        for dense in self._dense:
            dense.wait()
        self._sparse.clear()
        self._dense.clear()
