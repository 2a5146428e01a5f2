"""What the live objects of a run look like. Hooks assemble them once; in the step loop they are called directly.

Third parties write classes with these methods; inheriting from a protocol gives its empty defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

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
    reduce group, so a collective may be started there. A step that fails ends at the next `begin_step`, which must
    forget whatever was under way.

    With `[precision] loss_scale`, as fp16 needs, gradients are those of the loss times its scale in all of these methods: they
    are unscaled after `finish_step`, and clipped after that. A handler whose result is not linear in the gradients refuses such
    plans (`sley_check_plan`). `parts.numbers.add` in `attach` puts a number into every row; it is asked for unscaled ones.
    """

    def attach(self, parts: Parts) -> None:
        """Called once, when book and groups are closed. A reducer lays the store out here."""

    def begin_step(self, step: StepState) -> None:
        """Before the first forward of an optimizer step."""

    def gradient_ready(self, entry: Entry, step: StepState) -> None:
        """The accumulated gradient of `entry` on this rank is complete; its reduction may start."""

    def chunk_done(self, chunk: int, step: StepState) -> None:
        """The last gradient action of `chunk` is over; its entries are reported now, unless they wait for another chunk's."""

    def finish_step(self, step: StepState) -> None:
        """After the last action: on return `store.gradient(entry)` holds this handler's result."""

    def weights_updated(self, step: StepState) -> None:
        """After the optimizer step."""

    def detach(self) -> None:
        """The run closes, or could not be assembled."""


class SchedulerHook(Protocol):
    """Is called around every action, with the tensors that it concerns.

    Of a backward in two halves, the second, of weight gradients, comes in phase `weights` and without tensors. A layer that
    runs again within a backward is told by `before_forward`, in phase `recompute` and with its name.
    """

    def before_forward(self, micro: MicroStep, inputs: Any) -> None: ...
    def after_forward(self, micro: MicroStep, output: Any) -> None: ...
    def before_loss(self, micro: MicroStep, output: Any) -> None: ...
    def after_loss(self, micro: MicroStep, loss: Tensor) -> None: ...
    def before_backward(self, micro: MicroStep, output_gradient: Any) -> None: ...
    def after_backward(self, micro: MicroStep, input_gradient: Any) -> None: ...


class Loss(Protocol):
    """A loss is two functions, so that the scale of a gradient does not depend on the layout.

    The gradient of a step is the sum over everything it computes of d(loss)/dw, divided once by the weight of the whole
    batch. A weight that depends on the output cannot be known before the first backward and is refused; so is one that is not
    the sum of its micro-batches' weights, as that of a mean, and a loss with parameters, which belong in the last layer.

    A loss may have `fields`, the names of the batch fields that it reads: only those are moved to the device; and
    `attach(parts)`, called once as a handler's is, to add numbers to rows. `loss` runs in evaluations too, without gradients.
    """

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """The weight of these samples, from the batch alone, on the host (cross-entropy: labels not ignored)."""
        ...

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """The **sum** of the loss over these samples: a scalar."""
        ...


@runtime_checkable
class SplitLogits(Protocol):
    """What a weight communicator lets the last layer return in place of logits, where ranks share the classes.

    Only a loss whose record says `split_logits` is given one.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's logits if there were any: [..., classes]."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """The sum over this rank's `labels` int64 [...], fp32 at least; what `core.cross_entropy` means by its options.

        A collective of the ranks that share the classes. The gradient that comes in must be the same on all of them, as
        the one over the weight of the global batch is.
        """
        ...


class StageLink(Protocol):
    """Moves outputs and their gradients between stages; the plan's table `[link]` names it, or the schedule's record.

         prepare ──> begin ──> post | send | take ... ──> drain ─┐
                       ^                                         │
                       └─────────────────────────────────────────┘

    key: what the shapes at a boundary depend on; equal on both ends for the same micro-batch. `testing/link_contract.py` holds
    all of this, and the tests of a link inherit it.
    """

    def prepare(self, parts: Parts) -> None:
        """Called once, when the groups are made; messages travel on the lanes `up` and `down` of the group `pp`."""

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Begins a walk through a list of actions over micro-batches with these `keys`. `peers`: the stages at this one's
        boundaries, which begin the same walk; one that begins another is told by RunError `stages-differ`, on both ends, in
        `take` or `drain`."""

    def post(self, transfer: Transfer, key: Hashable) -> None:
        """Says that `transfer` will be taken. In each direction both ends post and send in one order; waits for nobody."""

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Hashable) -> None:
        """Starts to send `tensors`, of `description`, as they are now: the caller uses their memory for something else at once.
        Outputs arrive with the marks of `api.boundary.with_overlaps`."""

    def take(self, transfer: Transfer) -> tuple[Description, list[Tensor]]:
        """What came. The caller and everything that it calls may keep the tensors, views of them and what autograd makes
        of them: their memory is not written to while any of these lives."""
        ...

    def drain(self) -> None:
        """Ends the walk: waits until everything sent is away."""

    def abort(self, why: str) -> None:
        """Forgets the walk after a failure, without waiting for anybody."""


class WeightCommunicator(Protocol):
    """Gathers sharded weights just before they are used, and reduces their gradients over `wp` after.

         prepare ──> cuts* ──> attach ──> begin ──> during(action)* ─┐
                                            ^                        │
                                            └────────────────────────┘

    Core cuts, along the dim that it is told. Before it gathers or reads any weight of a layer, the communicator calls
    `parts.waits.wait_for` of that layer. What is written to shards between two steps counts from the next one on, and so do
    parameters that are frozen or trained again. A step that fails ends at the next `begin`, which must forget whatever was
    under way. `sley_core.testing.weight_contract` holds all of this.
    """

    def prepare(self, layers: Sequence[Layer]) -> None:
        """All of the model's layers, on meta, before anything is cut; raises PlanError for a model that cannot be done."""

    def cuts(self, places: Sequence[tuple[nn.Module, str]]) -> int | None:
        """The dim along which a parameter that `places` hold, and nothing else, is to be sharded; None: it stays whole.

        Asked on meta, on all ranks alike. What is cut so is padded with zeros; its gradient, of a shard's shape and summed
        over `wp`, is what the communicator gives the store.
        """
        ...

    def attach(self, parts: Parts) -> None:
        """Called once, when weights are cut and handlers attached. If it raises, modules are as they were."""

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """A step, or an evaluation, is about to run `actions` in this order."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        """Around `action`. When a chunk's last gradient action ends, all gradients of its weights are in the store."""
        ...

    def detach(self) -> None:
        """The run closes, or could not be assembled: modules are as before `attach`, but for stand-ins of shards."""


class SequenceCommunicator(Protocol):
    """Makes attention see whole sequences, of which every rank of `sp` has a slice.

    What an attention cannot do over slices it refuses by name, alike on all ranks. `sley_core.testing.attention_contract` says
    what it must be able to do.
    """

    def attach(self, layers: Sequence[Layer]) -> None:
        """Changes every attention in `layers`, all of the model's; called on meta, before the book is closed.

        Names of parameters stay as they are. Raises PlanError where there is no attention that it knows; then nothing is
        changed.
        """

    def detach(self) -> None:
        """The run closes, or could not be assembled: every attention is as it was, of whole sequences."""


class MemoryPool(Protocol):
    """Lends buffers. A lease is a context manager; a buffer that is lent is never lent again before it came back."""

    def lease(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> AbstractContextManager[Tensor]: ...
    def trim(self) -> int: ...


class ActivationPolicy(Protocol):
    """Decides what a layer keeps between its forward and its backward."""

    def call(self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any]) -> Any:
        """`layer(*args, **fields)`, with this policy's choice of what autograd saves."""
        ...


@runtime_checkable
class Counts(Protocol):
    """Any live object of a run that counts: a gradient handler, the weight communicator, a scheduler hook, a policy.

    `Run.counts` asks each after the last step; `summary.json` keeps what rank 0 found, and `train-cli run -v` prints it.
    """

    def counts(self) -> Mapping[str, float]:
        """Numbers by name, with the unit in it (`gathered_bytes_per_step`); asked at any time, without communication."""
        ...


@runtime_checkable
class MetricsWriter(Protocol):
    """Receives one row per optimizer step, on rank 0."""

    def write(self, row: Mapping[str, float | int]) -> None: ...
    def close(self) -> None: ...
