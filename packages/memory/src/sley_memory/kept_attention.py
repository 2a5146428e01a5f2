"""Keeps what the attentions of a layer gave, for its second run, and counts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sley_core.api.memory import version_of
from sley_core.errors import RunError


class KeptAttention:
    """Holds the results of attention in one call of a layer, first to last; None for one that is recomputed.

    It is kept as long as the layer's graph, so that the layer may run again as often as its backward does.
    """

    def __init__(self, tally: KeptTally) -> None:
        self.tally = tally
        self.num_bytes = 0
        self._results: list[list[tuple[Any, int]] | None] = []
        self._num_needed = 0
        self._at = 0

    def __del__(self) -> None:
        self.tally.add(-self.num_bytes)

    def put(self, result: Sequence[Any], *, is_drawn: bool) -> None:
        """Keeps the result of an attention, without its history, if the budget allows it; else notes that it must be computed
        again.

        is_drawn: whether it drew random numbers: then it must run again, or later draws would differ.
        """
        num_bytes = sum(value.untyped_storage().nbytes() for value in result if isinstance(value, Tensor))
        if is_drawn or not self.tally.may_keep(num_bytes):
            self.tally.again(num_bytes)
            self._results.append(None)
            return
        self.tally.add(num_bytes)
        self.num_bytes += num_bytes
        # Without the history that autograd gives the layer's own: that would keep the graph alive.
        self._results.append([(_detached(v), version_of(v)) if isinstance(v, Tensor) else (v, 0) for v in result])

    def saved(self) -> None:
        """Notes that the checkpoint saves a tensor: the second run goes on until it has saved as many, so it attends before."""
        self._num_needed = len(self._results)

    def rewind(self) -> None:
        """Lets `take` begin with the first result again."""
        self._at = 0

    def take(self) -> list[Any] | None:
        """Returns the next result, in the order in which they were kept; None if it must be computed again.

        Raises RunError `saved-in-place` if it was written on since it was kept, and `attention-differs` if there is none.
        """
        if self._at == len(self._results):
            raise self._differs("more")
        found = self._results[self._at]
        self._at += 1
        if found is None:
            return None
        if any(isinstance(value, Tensor) and version_of(value) != version for value, version in found):
            raise RunError(
                "saved-in-place",
                "a layer writes in place on what its attention gave, which `memory.selective` keeps for its second run",
                hint="let it make a new tensor (`h = h * g`), or take `core.recompute`",
            )
        return [_detached(value) if isinstance(value, Tensor) else value for value, _ in found]

    def check_taken(self) -> None:
        """Raises RunError `attention-differs` if the second run, which is over, attended less often than the first: one of its
        attentions may have been given what another computed.
        """
        if self._at < self._num_needed:
            raise self._differs("less") from None

    def _differs(self, how: str) -> RunError:
        return RunError(
            "attention-differs",
            f"{len(self._results)} attentions of a layer's first run were kept, and its second run, which `memory.selective` "
            f"makes in its backward, has {how}",
            hint="make what is no part of the layer, such as a trial in its first call, `aside()` (`sley_core.api.model`) and "
            "under torch.no_grad(); or take `core.recompute`",
        )


class KeptTally:
    """Counts bytes of attention kept, now and at most, over all micro-batches in flight; and how often.

    budget_bytes: the most bytes kept at one time; None for no limit.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.max_bytes = 0
        self.total_bytes = 0
        self.again_bytes = 0
        self.num_kept = 0
        self.num_again = 0
        self.seconds = 0.0

    def may_keep(self, num_bytes: int) -> bool:
        """Returns whether the budget has room for `num_bytes` more."""
        return self.budget_bytes is None or self.num_bytes + num_bytes <= self.budget_bytes

    def add(self, num_bytes: int) -> None:
        """Counts `num_bytes` of attention that are kept from now on, or, if negative, no more."""
        self.num_bytes += num_bytes
        self.max_bytes = max(self.max_bytes, self.num_bytes)
        if num_bytes > 0:
            self.total_bytes += num_bytes
            self.num_kept += 1

    def again(self, num_bytes: int) -> None:
        """Counts an attention of `num_bytes` that will run again."""
        self.again_bytes += num_bytes
        self.num_again += 1

    def counts(self) -> Mapping[str, float]:
        """Returns the numbers since the beginning, by name: bytes kept, attentions kept and recomputed, the host's seconds in
        second runs.
        """
        return {
            "kept_bytes": self.total_bytes,
            "max_kept_bytes": self.max_bytes,
            "kept_attentions": self.num_kept,
            "recomputed_attentions": self.num_again,
            "recomputed_attention_bytes": self.again_bytes,
            "recompute_host_s": self.seconds,
        }


def _detached(tensor: Tensor) -> Tensor:
    """Returns the tensor without a history. Below autograd, where a mode runs, its version would be lost without the guard."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
