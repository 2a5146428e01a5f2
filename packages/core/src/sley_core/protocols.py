"""The interfaces of a run's live objects. Hooks assemble the objects once; the step loop calls their methods directly.

Plugins write classes with these methods; a class that inherits from a protocol gets its empty methods as defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from sley_core.actions.action import Action, Transfer
    from sley_core.attempt import Lineage
    from sley_core.engine.boundary import Description
    from sley_core.engine.parts import Parts
    from sley_core.engine.registry import Param
    from sley_core.engine.step_state import MicroStep, Phase, StepState
    from sley_core.model.layers import Layer
    from sley_core.run_state.pieces import Saved, SavedRun


Collective = Literal["gather", "reduce", "sum", "swap"]
"""All-gather, reduce-scatter, all-reduce, all-to-all."""


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
        as soon as this returns. Outputs arrive with the marks of `Description.with_overlaps`.
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

         prepare ──> shard_dim* ──> attach ──> begin ──> during(action)* ─┐
                                                 ^                        │
                                                 └────────────────────────┘

    Core shards the parameters, along the dim that `shard_dim` returns. Before it gathers or reads any weight of a layer, the
    communicator calls `parts.waits.wait_for` of that layer. Values written to shards between two steps, and parameters frozen
    or unfrozen there, take effect in the next step. A failed step is followed directly by the next `begin`, which must discard
    everything that was in flight. `sley_testing.weight_contract` tests all of this.
    """

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Receives all layers of the model, on meta, before anything is sharded. This rank's layers have other modules, of the
        same names, in `attach`. Raises PlanError for a model that it does not support.
        """

    def shard_dim(self, places: Sequence[tuple[nn.Module, str]]) -> int | None:
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
        """Called when the run closes, or was not assembled. Restores modules as before `attach`; stand-ins of shards stay."""


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
        """Lends a buffer with undefined contents, [*shape] of `dtype` on `device`, within the block."""
        ...

    def trim(self) -> int:
        """Frees every buffer that is not lent; returns the number of bytes freed."""
        ...

    def held(self) -> Iterable[tuple[str, Tensor]]:
        """Yields name and tensor of everything that it holds, lent or not: the memory that it keeps between two steps."""
        return ()


class GradientHandler(Protocol):
    """Works on accumulated gradients, between backward and the optimizer step. Installs no autograd hooks.

         attach ──> begin_step ──> gradient_ready* ──> chunk_done* ──> finish_step ──> weights_updated ─┐
                       ^                                                                                │
                       └────────────────────────────────────────────────────────────────────────────────┘

    The store calls `gradient_ready` once per parameter and step, in one order that is the same on all ranks of the parameter's
    reduce group, so a collective may be started there. A failed step is followed directly by the next `begin_step`,
    which must discard everything that was in flight.

    With `[precision] loss_scale`, as fp16 needs, gradients are those of the scaled loss in all of these methods: they
    are unscaled after `finish_step`, and clipped after that. A handler whose result is not linear in the gradients
    refuses such plans (`sley_check_plan`). `parts.numbers.add` in `attach` adds a number to every metrics row; it must
    be unscaled.
    """

    def attach(self, parts: Parts) -> None:
        """Called once, when the parameter registry and the groups are complete. A reducer lays out the store's buffers here."""

    def begin_step(self, step: StepState) -> None:
        """Called before the first forward of an optimizer step."""

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Called when the accumulated gradient of `param` on this rank is complete; its reduction may start."""

    def chunk_done(self, chunk: int, step: StepState) -> None:
        """Called after the last gradient action of `chunk`. Its parameters have been reported ready, except those that come in
        the order after an incomplete parameter of another chunk.
        """

    def finish_step(self, step: StepState) -> None:
        """Called after the last action: when it returns, `store.gradient(param)` must hold this handler's result."""

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
    """Computes a loss in two functions, so that the scale of a gradient does not depend on the layout.

    A step's gradient is the sum of d(loss)/dw over all its samples, divided once by the weight of the global batch. The run
    refuses a weight that depends on the output, because it is not known before the first backward; a weight that is not the sum
    of its micro-batches' weights, as for a mean; and a loss with parameters, which belong in the last layer.

    A loss may have `fields`, the names of the batch fields that it reads: only those are moved to the device. It may have
    `attach(parts)`, called once like a handler's, to add numbers to metrics rows. `loss` runs in evaluations too, without
    gradients; and, on a shallow copy of the loss, for the samples of each source where a micro-batch of a mixture has several.
    """

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Returns the weight of these samples, from the batch alone, on the host (cross-entropy: the labels not ignored)."""
        ...

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the **sum** of the loss over these samples: a scalar tensor."""
        ...


@runtime_checkable
class SplitLogits(Protocol):
    """Holds vocabulary-parallel logits: the last layer returns it in place of logits if ranks share the classes.

    A weight communicator makes it. Only a loss whose record declares `split_logits` receives one.
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

    def logits(self) -> Tensor:
        """Returns this rank's whole logits, [..., classes], without a graph: a collective of ranks that share the classes."""
        ...


class ActivationPolicy(Protocol):
    """Decides what a layer saves between its forward and its backward; evaluations bypass it. attach ──> (begin ──> call*)*"""

    def attach(self, parts: Parts) -> None:
        """Called once, before the first step. Not called when layers are timed for a partition: `call` then has no run."""
        return

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Called before a step or an evaluation runs `actions`; must discard what a failed step left."""
        return

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Returns `layer(*args, **fields)`, with this policy's choice of what autograd saves. micro: step, chunk, micro-batch
        and phase of the call.
        """
        ...

    def detach(self) -> None:
        """Called when the run closes, or could not be assembled."""
        return


@runtime_checkable
class Counts(Protocol):
    """Reports numbers. Any live object of a run may have it: a gradient handler, the weight communicator, the stage link, a
    scheduler hook, a policy, a pool.

    `Run.counts` asks each after the last step; `summary.json` keeps the numbers of rank 0, and `train-cli run -v` prints them.
    Objects that communicate report `sent_bytes_per_step`, as `api.comm.SentBytes` counts it.
    """

    def counts(self) -> Mapping[str, float]:
        """Returns numbers by name, with the unit in it (`gathered_bytes_per_step`), at any time; does not communicate."""
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
        """Restores what `kept` returned, on the host; an empty mapping starts anew. On all ranks, between two steps."""
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


class Restored(NamedTuple):
    """Says what `Run.load_checkpoint` has loaded. path: of the checkpoint. step: how many optimizer steps were done. lineage:
    the attempts that took its steps (`SavedRun.lineage`). notes: for the user. passed_over: newer checkpoints that are damaged,
    each with its damages.
    """

    path: str
    step: int
    lineage: Lineage
    notes: list[str]
    passed_over: Sequence[tuple[str, Sequence[object]]] = ()


class Checkpointer(Protocol):
    """Saves and restores a run, on each of its ranks; named by the plan's table `[checkpoint]`. All ranks call each method
    alike, between two steps, but for `stage`, `counts` and `close`.

         probe ──> (is_due ──> save_due)* ──> train_done ──> close            save, load: whenever the program asks

    `save` and `load` are needed; the defaults of the others never save by themselves.
    """

    def save(self, path: str | Path | None, step: int) -> str:
        """Writes a checkpoint of the run after `step` steps; returns its path or URL once it is complete on all ranks.

        path: where; None for the next one in the run's folder of checkpoints (`TrainingState.folder`). Calls
        `TrainingState.attempt.begin(step)` before it saves, and `TrainingState.attempt.saved(step)` after it saved there.
        Raises RunError "checkpoint-failed" on all ranks alike if it cannot be written.
        """
        ...

    def load(self, path: str | Path, *, anew: bool) -> Restored | None:
        """Restores the run by `TrainingState.restore`, and returns what was loaded; None for "auto" if the run may begin.

        path: a checkpoint, or a folder of several, of which the newest whole one is loaded; "auto" for the newest that this run
        wrote. anew: whether "auto" may return None although the run has taken steps; otherwise that raises
        (`RunAttempt.refuse_to_begin_anew`). Raises on all ranks alike, with nothing changed: RunError "no-checkpoint",
        "checkpoint-damaged", and what `TrainingState.restore` raises.
        """
        ...

    def probe(self) -> None:
        """Called before the first step of `Run.train`. Raises RunError on all ranks alike if the saves to come would fail."""
        return

    def is_due(self, step: int) -> bool:
        """Returns whether to save after `step`, the same on all ranks."""
        return False

    def wants_save(self) -> bool:
        """Returns this rank's vote for a save after the step in progress. Where any rank votes, all are told by `ask`."""
        return False

    def ask(self) -> None:
        """Called once ranks have voted for a save: the next `is_due` says so."""
        return

    def save_due(self, step: int) -> None:
        """Starts the save that is due, and may end it later. A failure is a note of `TrainingState`: the run goes on."""
        self.save(None, step)

    def train_done(self, step: int, *, was_stopped: bool) -> None:
        """Called after the last step of `Run.train`: ends the save in progress, and saves the run. was_stopped: whether ranks
        have asked to stop before the plan's last step.
        """
        return

    def stage(self) -> None:
        """Called before weights, masters or optimizer states change or move: copies what a save in progress has not read yet.
        Does not communicate.
        """
        return

    def counts(self) -> Mapping[str, float]:
        """Returns numbers by name, as `Counts` does."""
        return {}

    def close(self) -> None:
        """Ends the save in progress, as far as the other ranks still answer. Does not communicate."""
        return


class CheckpointFiles(Protocol):
    """Reads checkpoints without a run, for the command line: which there are, and their weights. Paths may be URLs."""

    def names(self, folder: str) -> list[str]:
        """Returns the names of the complete checkpoints in a folder of several, the newest first."""
        ...

    def describe(self, path: str) -> SavedRun | None:
        """Returns the description of the checkpoint at `path`; None if there is none. Raises RunError "checkpoint-damaged"."""
        ...

    def is_whole(self, path: str) -> bool:
        """Returns whether the checkpoint at `path` is as it was written. Reads all of it."""
        ...

    def open(self, path: str) -> Saved | None:
        """Returns the checkpoint at `path`, or the newest whole one of several there; None for a folder that has none.

        Reads all of it once, and raises RunError "checkpoint-damaged" if it is not as it was written.
        """
        ...
