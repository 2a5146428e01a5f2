"""The interfaces of a run's live objects. Hooks assemble the objects once; the step loop calls their methods directly.

Plugins write classes with these methods; a class that inherits from a protocol gets its empty methods as defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    import torch
    from torch import Tensor, nn

    from sley_core.actions.action import Action, Transfer
    from sley_core.engine.book import Entry
    from sley_core.engine.boundary import Description
    from sley_core.engine.parts import Parts
    from sley_core.engine.step_state import MicroStep, Phase, StepState
    from sley_core.model.layers import Layer


class GradientHandler(Protocol):
    """Works on accumulated gradients, between backward and the optimizer step. Installs no autograd hooks.

         attach ──> begin_step ──> gradient_ready* ──> chunk_done* ──> finish_step ──> weights_updated ─┐
                       ^                                                                                │
                       └────────────────────────────────────────────────────────────────────────────────┘

    The store calls `gradient_ready` once per entry and step, in one order that is the same on all ranks of the entry's
    reduce group, so a collective may be started there. A failed step is followed directly by the next `begin_step`,
    which must discard everything that was in flight.

    With `[precision] loss_scale`, as fp16 needs, gradients are those of the scaled loss in all of these methods: they
    are unscaled after `finish_step`, and clipped after that. A handler whose result is not linear in the gradients
    refuses such plans (`sley_check_plan`). `parts.numbers.add` in `attach` adds a number to every metrics row; it must
    be unscaled.
    """

    def attach(self, parts: Parts) -> None:
        """Called once, when the parameter book and the groups are complete. A reducer lays out the store's buffers here."""

    def begin_step(self, step: StepState) -> None:
        """Called before the first forward of an optimizer step."""

    def gradient_ready(self, entry: Entry, step: StepState) -> None:
        """Called when the accumulated gradient of `entry` on this rank is complete; its reduction may start."""

    def chunk_done(self, chunk: int, step: StepState) -> None:
        """Called after the last gradient action of `chunk`. Its entries have been reported ready, unless they wait for
        another chunk's in the order.
        """

    def finish_step(self, step: StepState) -> None:
        """Called after the last action: on return `store.gradient(entry)` must hold this handler's result."""

    def weights_updated(self, step: StepState) -> None:
        """Called after the optimizer step."""

    def detach(self) -> None:
        """Called when the run closes, or when it could not be assembled."""


class SchedulerHook(Protocol):
    """Is called before and after every action, with the tensors that enter or leave it.

    The weight half of a split backward (action W) calls `before_backward` and `after_backward` in phase `weights`, with
    None for the tensors. A layer that is recomputed within a backward calls `before_forward` in phase `recompute`, with
    its name in `micro.layer`.
    """

    def before_forward(self, micro: MicroStep, inputs: Any) -> None: ...
    def after_forward(self, micro: MicroStep, output: Any) -> None: ...
    def before_loss(self, micro: MicroStep, output: Any) -> None: ...
    def after_loss(self, micro: MicroStep, loss: Tensor) -> None: ...
    def before_backward(self, micro: MicroStep, output_gradient: Any) -> None: ...
    def after_backward(self, micro: MicroStep, input_gradient: Any) -> None: ...


class Loss(Protocol):
    """A loss is two functions, so that the scale of a gradient does not depend on the layout.

    A step's gradient is the sum of d(loss)/dw over all its samples, divided once by the weight of the global batch.
    Refused are a weight that depends on the output, because it is not known before the first backward; one that is not
    the sum of its micro-batches' weights, as that of a mean; and a loss with parameters, which belong in the last
    layer.

    A loss may have `fields`, the names of the batch fields that it reads: only those are moved to the device. It may
    have `attach(parts)`, called once as a handler's is, to add numbers to metrics rows. `loss` runs in evaluations too,
    without gradients.
    """

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Returns the weight of these samples, from the batch alone, on the host (cross-entropy: the number of labels
        not ignored).
        """
        ...

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the **sum** of the loss over these samples: a scalar tensor."""
        ...


@runtime_checkable
class SplitLogits(Protocol):
    """Vocabulary-parallel logits: what the last layer returns in place of logits where ranks share the classes.

    A weight communicator makes it. Only a loss whose record says `split_logits` receives one.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that this rank's unsharded logits would have: [..., classes]."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum of the cross-entropy over this rank's `labels` int64 [...], in fp32 at least; options as in
        `core.cross_entropy`.

        Communicates: a collective of the ranks that share the classes. The gradient of the result must be the same on
        all of them, as it is when it comes from the division by the weight of the global batch.
        """
        ...


class StageLink(Protocol):
    """Moves outputs and their gradients between stages; the plan's table `[link]` names it, or the schedule's record.

         prepare ──> begin ──> post | send | take ... ──> drain ─┐
                       ^                                         │
                       └─────────────────────────────────────────┘

    key: everything on which the shapes at a boundary depend; equal on both ends for the same micro-batch.
    `testing/link_contract.py` tests all of this, and the tests of a link inherit it.
    """

    def prepare(self, parts: Parts) -> None:
        """Called once, when the groups are made; messages travel on the lanes `up` and `down` of the group `pp`."""

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Starts the exchanges of one list of actions, over micro-batches with these `keys`; a step or an evaluation
        calls it.

        peers: the neighbouring stages, which begin the same list. If one begins another, `take` or `drain` raises
        RunError `stages-differ` on both ends.
        """

    def post(self, transfer: Transfer, key: Hashable) -> None:
        """Announces the receive `transfer`, which `take` will complete. Does not block. In each direction both ends
        call `post` and `send` in the same order.
        """

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Hashable) -> None:
        """Starts to send `tensors`, laid out as `description` says. Sends the values that they have now: the caller
        reuses their memory as soon as this returns. Outputs arrive with the marks of `api.boundary.with_overlaps`.
        """

    def take(self, transfer: Transfer) -> tuple[Description, list[Tensor]]:
        """Waits for a posted `transfer` and returns its description and tensors.

        The link must not write to their memory while the tensors, views of them or anything that autograd saved of them
        is alive.
        """
        ...

    def drain(self) -> None:
        """Waits until everything is sent, and ends what `begin` started."""

    def abort(self, why: str) -> None:
        """Discards all exchanges in flight after a failure, without waiting for peers."""


class WeightCommunicator(Protocol):
    """Gathers sharded weights just before they are used, and reduces their gradients over `wp` after.

         prepare ──> cuts* ──> attach ──> begin ──> during(action)* ─┐
                                            ^                        │
                                            └────────────────────────┘

    Core shards the parameters, along the dim that `cuts` returns. Before it gathers or reads any weight of a layer, the
    communicator calls `parts.waits.wait_for` of that layer. Values written to shards between two steps, and parameters
    frozen or unfrozen there, take effect in the next step. A failed step is followed directly by the next `begin`,
    which must discard everything that was in flight. `sley_core.testing.weight_contract` tests all of this.
    """

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Receives all layers of the model, on meta, before anything is sharded. Raises PlanError for a model that it
        does not support.
        """

    def cuts(self, places: Sequence[tuple[nn.Module, str]]) -> int | None:
        """Returns the dim along which to shard a parameter, or None to keep it unsharded.

        places: every (module, attribute) that holds the parameter. Asked on meta, with the same answer on all ranks.
        Shards are padded with zeros; the communicator gives the store a gradient of a shard's shape, summed over `wp`.
        """
        ...

    def attach(self, parts: Parts) -> None:
        """Called once, when weights are sharded and handlers attached. If it raises, it leaves modules as they were."""

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Called before a step or an evaluation runs `actions`, in this order."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        """Returns a context manager that surrounds `action`. When a chunk's last gradient action ends, all gradients of
        its weights must be in the store.
        """
        ...

    def detach(self) -> None:
        """Called when the run closes, or could not be assembled. Restores modules as they were before `attach`;
        stand-ins of shards stay.
        """


class SequenceCommunicator(Protocol):
    """Makes attention work on full sequences although every rank of `sp` holds only a slice.

    An attention that it does not support over slices is refused by name, on all ranks alike.
    `sley_core.testing.attention_contract` says what it must support.
    """

    def attach(self, layers: Sequence[Layer]) -> None:
        """Changes every attention in `layers`, all of the model's; called on meta, before the parameter book is made.

        Parameter names do not change. Raises PlanError if it knows no attention in them; then nothing is changed.
        """

    def detach(self) -> None:
        """Called when the run closes, or could not be assembled. Restores every attention for full sequences."""


class MemoryPool(Protocol):
    """Lends buffers, to all who name it. A lease is a context manager; its buffer is not lent again before it ends."""

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Tensor]:
        """Returns a context manager that gives a buffer with undefined contents, and takes it back at its end."""
        ...

    def trim(self) -> int:
        """Frees every buffer that is not lent; returns how many bytes that were."""
        ...

    def held(self) -> Iterable[tuple[str, Tensor]]:
        """Yields name and tensor of everything that it holds, lent or not: what it keeps between two steps."""
        return ()


class ActivationPolicy(Protocol):
    """Decides what a layer saves between its forward and its backward; evaluations pass it by. attach ──> (begin ──> call*)*"""

    def attach(self, parts: Parts) -> None:
        """Called once, before the first step. Not called where layers are timed for a partition: there `call` has no run."""
        return

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Called before a step or an evaluation runs `actions`; what a failed step left must be forgotten here."""
        return

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Returns `layer(*args, **fields)`, with this policy's choice of what autograd saves. micro: what is running."""
        ...

    def detach(self) -> None:
        """Called when the run closes, or could not be assembled."""
        return


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
