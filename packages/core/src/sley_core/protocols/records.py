"""The interfaces of what is written down of a run: numbers, rows, and what a part keeps for later steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Counts(Protocol):
    """Any live object of a run that counts something: a gradient handler, the weight communicator, the stage link, a
    scheduler hook, a policy, a pool.

    `Run.counts` asks each after the last step; `summary.json` keeps the numbers of rank 0, and `train-cli run -v`
    prints them. What exchanges says `sent_bytes_per_step`, as `api.comm.SentBytes` counts it.
    """

    def counts(self) -> Mapping[str, float]:
        """Returns numbers by name, with the unit in the name (`gathered_bytes_per_step`). May be called at any time;
        does not communicate.
        """
        ...


@runtime_checkable
class Keeps(Protocol):
    """Any live object of a run that keeps something from one step to the next which the bits of later steps depend on: a
    gradient handler, the weight communicator, the stage link, a scheduler hook, a policy.

    A checkpoint has it for each rank, and gives it back where the layout is the same.
    """

    def kept(self) -> Mapping[str, Tensor]:
        """Returns what this rank keeps, by name; live tensors. Called between two steps; does not communicate."""
        ...

    def restore_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Takes what `kept` returned, on the host, or nothing, to begin anew. All ranks call it, between two steps."""
        ...


@runtime_checkable
class MetricsWriter(Protocol):
    """Receives one row per optimizer step, on rank 0."""

    def write(self, row: Mapping[str, float | int]) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Rewinds(Protocol):
    """A metrics writer whose output a run can go on from."""

    def rewind(self, step: int) -> None:
        """Drops the rows of steps after `step`, which are taken again."""
