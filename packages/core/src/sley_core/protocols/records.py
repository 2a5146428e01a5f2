"""The interfaces through which a run records things: counters, metrics rows, and state kept for later steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Counts(Protocol):
    """Reports numbers. Any live object of a run may have it: a gradient handler, the weight communicator, the stage link, a
    scheduler hook, a policy, a pool.

    `Run.counts` asks each after the last step; `summary.json` keeps the numbers of rank 0, and `train-cli run -v` prints them.
    Objects that communicate report `sent_bytes_per_step`, as `api.comm.SentBytes` counts it.
    """

    def counts(self) -> Mapping[str, float]:
        """Returns numbers by name, with the unit in the name (`gathered_bytes_per_step`). May be called at any time;
        does not communicate.
        """
        ...


@runtime_checkable
class Keeps(Protocol):
    """Saves state in checkpoints. Any live object of a run has it that keeps something between steps on which the bits of later
    steps depend: a gradient handler, the weight communicator, the stage link, a scheduler hook, a policy.

    A checkpoint stores it for each rank, and restores it if the layout is the same.
    """

    def kept(self) -> Mapping[str, Tensor]:
        """Returns what this rank keeps, by name, as live tensors. Called between two steps; does not communicate."""
        ...

    def restore_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Restores what `kept` returned, on the host; with an empty mapping, starts anew. Called on all ranks, between two
        steps.
        """
        ...


@runtime_checkable
class MetricsWriter(Protocol):
    """Receives one row per optimizer step, on rank 0."""

    def write(self, row: Mapping[str, float | int]) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Rewinds(Protocol):
    """Marks a metrics writer whose output a resumed run can continue."""

    def rewind(self, step: int) -> None:
        """Drops the rows of all steps after `step`, which will be taken again."""
