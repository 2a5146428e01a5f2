"""The interfaces of objects that move values between ranks, and of memory pools."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    import torch
    from torch import Tensor, nn

    from sley_core.actions.action import Action, Transfer
    from sley_core.engine.boundary import Description
    from sley_core.engine.parts import Parts, Phase
    from sley_core.model.layers import Layer


class StageLink(Protocol):
    """Moves outputs and their gradients between stages; named by the plan's table `[link]`, or by the schedule's record.

         prepare ──> begin ──> post | send | take ... ──> drain ─┐
                       ^                                         │
                       └─────────────────────────────────────────┘

    key: everything that determines the shapes at a boundary; equal on both ends for the same micro-batch. A tuple, whose first
    is the phase.
    `testing/link_contract.py` tests all of this, and the tests of a link inherit it.
    """

    def prepare(self, parts: Parts) -> None:
        """Called once, when the groups exist; messages use the lanes `up` and `down` of the group `pp`."""

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Starts the exchanges of one list of actions, over micro-batches with these `keys`; called by a step or an evaluation.

        peers: the neighbouring stages, which begin the same list. If one begins another list, `take` or `drain` raises RunError
        `stages-differ` on both ends.
        """

    def post(self, transfer: Transfer, key: Hashable) -> None:
        """Announces the receive `transfer`, which `take` will complete. Does not block. In each direction both ends
        call `post` and `send` in the same order.
        """

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Hashable) -> None:
        """Starts to send `tensors`, laid out as `description` says. Sends their present values: the caller reuses their memory
        as soon as this returns. Outputs arrive with the marks of `api.boundary.with_overlaps`.
        """

    def take(self, transfer: Transfer) -> tuple[Description, list[Tensor]]:
        """Waits for a posted `transfer` and returns its description and tensors.

        The link must not write to their memory while the tensors, views of them or anything that autograd saved of them are
        alive.
        """
        ...

    def drain(self) -> None:
        """Waits until everything is sent, and ends what `begin` started."""

    def abort(self, why: str) -> None:
        """Discards all exchanges in flight after a failure, without waiting for peers."""


class WeightCommunicator(Protocol):
    """Gathers sharded weights just before they are used, and reduces their gradients over `wp` afterwards.

         prepare ──> cuts* ──> attach ──> begin ──> during(action)* ─┐
                                            ^                        │
                                            └────────────────────────┘

    Core shards the parameters, along the dim that `cuts` returns. Before it gathers or reads any weight of a layer, the
    communicator calls `parts.waits.wait_for` of that layer. Values written to shards between two steps, and parameters frozen
    or unfrozen there, take effect in the next step. A failed step is followed directly by the next `begin`, which must discard
    everything that was in flight. `sley_testing.weight_contract` tests all of this.
    """

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Receives all layers of the model, on meta, before anything is sharded. This rank's layers have other modules, of the
        same names, in `attach`. Raises PlanError for a model that it does not support.
        """

    def cuts(self, places: Sequence[tuple[nn.Module, str]]) -> int | None:
        """Returns the dim along which to shard a parameter, or None to keep it unsharded.

        places: every (module, attribute) that holds the parameter. Called on meta; the answer must be the same on all ranks.
        Shards are padded with zeros; the communicator gives the store a gradient of a shard's shape, summed over `wp`.
        """
        ...

    def attach(self, parts: Parts) -> None:
        """Called once, when weights are sharded and handlers attached. If it raises, it must leave modules unchanged."""

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Called before a step or an evaluation runs `actions`, in this order."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        """Returns a context manager that surrounds `action`. When a chunk's last gradient action ends, the store must have all
        gradients of the chunk's weights.
        """
        ...

    def detach(self) -> None:
        """Called when the run closes, or could not be assembled. Restores modules as they were before `attach`;
        stand-ins of shards stay.
        """


class SequenceCommunicator(Protocol):
    """Makes attention work on full sequences although every rank of `sp` holds only a slice.

    It must refuse by name, on all ranks alike, an attention that it does not support over slices.
    `sley_testing.attention_contract` says what it must support.
    """

    apart: Sequence[str] | None = None
    """Patterns of names of layers that are not asked whether they mix positions in another way; None: none is asked. Only an
    attention that calls each attention through `sley_core.api.model.attended` may have any.
    """

    def attach(self, layers: Sequence[Layer]) -> None:
        """Changes every attention in `layers`, the model's layers; called before the parameter registry is made, when this
        rank's layers have their first values and the others are on meta.

        Parameter names must not change. Raises PlanError, and changes nothing, if it finds no attention that it knows.
        """

    def detach(self) -> None:
        """Called when the run closes, or could not be assembled. Restores every attention for full sequences."""


class MemoryPool(Protocol):
    """Lends buffers to every user that names it. A lease is a context manager; its buffer is not lent again before it ends."""

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Tensor]:
        """Returns a context manager that lends a buffer with undefined contents, [*shape] of `dtype` on `device`, and takes it
        back at the end.
        """
        ...

    def trim(self) -> int:
        """Frees every buffer that is not lent; returns the number of bytes freed."""
        ...

    def held(self) -> Iterable[tuple[str, Tensor]]:
        """Yields name and tensor of everything that it holds, lent or not: the memory that it keeps between two steps."""
        return ()
