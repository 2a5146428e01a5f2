"""The interfaces of the parts of a run. The run builds each part once, from a record; its step loop calls the methods of the
parts directly.

Plugins define classes with these methods. A class that inherits from a protocol gets the protocol's empty methods as defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from sley_core.actions.action import Action, Transfer
    from sley_core.checkpointing import CheckpointReader, SavedRun
    from sley_core.data.dataset import DataInfo
    from sley_core.engine.boundary import Description
    from sley_core.engine.parts import MicroStep, Parts, Phase, StepState
    from sley_core.engine.registry import Param
    from sley_core.losses.chunked_head import HeadChunks
    from sley_core.model.layers import Layer
    from sley_core.run_folder import Lineage

Collective = Literal["gather", "reduce", "sum", "swap"]
"""The kinds of collectives: all-gather, reduce-scatter, all-reduce and all-to-all, in this order."""

LayerCall = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Calls a layer with the previous layer's output and with batch fields, and returns its output."""


class StageLink(Protocol):
    """Moves outputs and their gradients between pipeline stages. The plan's `[link]` table names the link; by default, the
    record of the schedule names it.

         prepare ──> begin ──> post_receive | send | receive ... ──> drain ─┐
                       ^                                                    │
                       └────────────────────────────────────────────────────┘

    A `key` is a tuple that determines the shapes at a boundary; its first item is the phase. Both ends use equal keys for the
    same microbatch. Messages use buffers of `parts.pool`. An optional method `trim()`, called between two steps, frees the
    buffers that no message needs, and returns the number of freed bytes. The contract
    `sley_testing.pipeline_contract.StageLinkContract` tests these rules.
    """

    def prepare(self, parts: Parts) -> None:
        """Prepares the channels `up` and `down` of the `pp` group, which messages use. Called once, after the groups are
        created.
        """

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Starts the exchanges of one list of actions; called at the start of a step or an evaluation.

        keys: the key of each microbatch, in order. peers: the neighbouring stages, which must begin with equal `keys`. If
        a peer begins with other keys, `receive` or `drain` raises RunError `stages-differ` on both ends.
        """

    def post_receive(self, transfer: Transfer, key: Hashable) -> None:
        """Posts a receive, which `receive` completes; does not block. In each direction, posts have the order of the sends."""

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Hashable) -> None:
        """Starts to send `tensors`, whose layout is `description`. When this method returns, the caller may reuse the memory of
        `tensors`. The peer receives the result of `Description.with_overlaps`.
        """

    def receive(self, transfer: Transfer) -> tuple[Description, list[Tensor]]:
        """Waits for the posted `transfer` and returns its description and tensors, whose memory the link must not overwrite
        while the tensors, their views or autograd's saved tensors are alive.
        """
        ...

    def drain(self) -> None:
        """Waits until all sends are complete, and ends the exchanges that `begin` started."""

    def abort(self, reason: str) -> None:
        """Discards all exchanges in progress after a failure, without waiting for peers."""


class WeightCommunicator(Protocol):
    """Gathers sharded weights just before they are used, and reduces their gradients over `wp` afterwards.

         prepare ──> shard_dim* ──> attach ──> begin ──> wrap_action(action)* ─┐
                                                 ^                             │
                                                 └─────────────────────────────┘

    Core shards each parameter along the dim that `shard_dim` returns. The communicator must call
    `parts.waits.wait_for(layer_name)` before it gathers or reads any weight of the layer. If the program changes the values of
    shards or `requires_grad` between two steps, the next step must use the changes. After a failed step, `begin` is called next
    and must discard all exchanges in progress. `sley_testing.weight_contract` tests these rules.

    head: the model's last linear, if the communicator shards this linear and computes the loss from it, else None. `prepare`
    sets it.
    """

    head: HeadChunks | None = None

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Checks the model and sets `head`. Raises PlanError if the model is not supported. Called with all layers, on meta,
        before any parameter is sharded. The modules that `attach` finds later are different objects with the same names.
        """

    def shard_dim(self, locations: Sequence[tuple[nn.Module, str]]) -> int | None:
        """Returns the dim along which to shard a parameter, or None to keep the parameter unsharded.

        locations: every (module, attribute name) that holds the parameter. Called while the parameter is on meta; the result
        must be the same on all ranks. Shards are padded with zeros. The gradients that the communicator adds to the store must
        have the shape of the shard and be summed over `wp`.
        """
        ...

    def attach(self, parts: Parts) -> None:
        """Installs the communicator, once, after sharding. If it raises, it must leave all modules unchanged."""

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Discards the exchanges of a failed step, and prepares to gather the weights of `actions`, which run in this order.
        Called before each step and each evaluation.

        phase: `Phase.TRAIN` before a step, `Phase.EVALUATE` before an evaluation, which has no backward.
        """

    def wrap_action(self, action: Action) -> AbstractContextManager[None]:
        """Returns a context manager in which `action` runs. When the last gradient action of a chunk ends, the store must hold
        all gradients of the chunk's weights.
        """
        ...

    def detach(self) -> None:
        """Restores the modules' forwards; the weights remain sharded. Called when the run closes or its assembly fails."""


class SequenceCommunicator(Protocol):
    """Lets attention see full sequences although each rank of `sp` holds only a slice.

    If it does not support an attention, the communicator must raise an error that names the attention, on all ranks.
    `sley_testing.attention_contract` lists the attentions that must be supported.
    """

    def prepare(self, data: DataInfo) -> None:
        """Receives the declaration of the data, which has a `positions` field and the full sequence length. Called before
        `attach`.
        """
        return

    def attach(self, layers: Sequence[Layer]) -> None:
        """Wraps every attention in `layers`, the layers of the whole model, before the parameter registry is built. This rank's
        layers have their initial values; the other layers are on meta. Parameter names must not change. Raises PlanError, and
        changes nothing, if it finds no attention that it knows.
        """

    def call_layer(
        self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], call: LayerCall, rerun: LayerCall
    ) -> Any:
        """Calls `layer` on slices, in training, and returns the layer's output, `call(args, fields)`. To find layers that mix
        positions outside attention, a communicator may compare this output with the output of `rerun`, which calls the layer
        without the activation policy.
        """
        return call(args, fields)

    def detach(self) -> None:
        """Restores every attention. Called when the run closes or its assembly fails."""


class GradientHandler(Protocol):
    """Processes accumulated gradients between backward and the optimizer step. Must not install autograd hooks.

         attach ──> begin_step ──> gradient_ready* ──> chunk_done* ──> finish_step ──> weights_updated ─┐
                       ^                                                                                │
                       └────────────────────────────────────────────────────────────────────────────────┘

    The store calls `gradient_ready` once per parameter and step, in an order that is the same on all ranks of the parameter's
    reduce group, so `gradient_ready` may start a collective. After a failed step, `begin_step` is called next and must discard
    all exchanges in progress.

    With `[precision] loss_scale`, which fp16 needs, all of these methods see gradients of the scaled loss. The run unscales the
    gradients after `finish_step` and then clips them. A handler whose result is not linear in the gradients must reject such
    plans in `sley_check_plan`. In `attach`, a handler may call `parts.numbers.add` to add a number to every metrics row; the
    number is computed from unscaled gradients.

    A handler that keeps device memory between steps must have a method `named_tensors`, which yields the name and tensor of all
    of this memory, offloaded or not, and always yields the same tensor objects.
    """

    def attach(self, parts: Parts) -> None:
        """Stores the parts that later calls need; a reducer also lays out the store's buffers. Called once, when the parameter
        registry and the groups are complete.
        """

    def begin_step(self, step: StepState) -> None:
        """Discards the exchanges of a failed step, and resets what the handler keeps for one step. Called before the first
        forward of an optimizer step.
        """

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """May start the reduction of the gradient of `param`. Called when the accumulated gradient on this rank is complete."""

    def chunk_done(self, chunk: int, step: StepState) -> None:
        """May start work on the chunk's gradients. Called after the last gradient action of `chunk`. By then `gradient_ready`
        has been called for the chunk's parameters, except parameters whose turn in the common order comes after an incomplete
        parameter of another chunk.
        """

    def finish_step(self, step: StepState) -> None:
        """Completes this handler's work, so that `store.gradient(param)` holds its result. Called after the last action."""

    def weights_updated(self, step: StepState) -> None:
        """Starts work that needs the updated weights, such as a gather of their parts. Called after the optimizer step."""

    def detach(self) -> None:
        """Ends the exchanges in progress, even if a peer has failed, and undoes what `attach` changed outside the handler.
        Called when the run closes or its assembly fails.
        """


class SchedulerHook(Protocol):
    """Observes every action before and after it runs, with the action's input and output tensors. micro: identifies the call.

    The weight half of a split backward (action W) calls `before_backward` and `after_backward` in phase `weights`, with None
    for the tensors. The recomputation of a layer within a backward calls `before_forward` in phase `recompute`, with the layer
    name in `micro.layer`.
    """

    def before_forward(self, micro: MicroStep, inputs: Any) -> None:
        """Observes the start of a forward. inputs: the inputs of the chunk (None for the first) or of the recomputed layer."""

    def after_forward(self, micro: MicroStep, output: Any) -> None:
        """Observes the end of a microbatch's forward. output: the output of the chunk."""

    def before_loss(self, micro: MicroStep, output: Any) -> None:
        """Observes the start of a microbatch's loss. output: the output of the model."""

    def after_loss(self, micro: MicroStep, loss: Tensor) -> None:
        """Observes the end of a microbatch's loss. loss: the sum."""

    def before_backward(self, micro: MicroStep, output_gradient: Any) -> None:
        """Observes the start of a microbatch's backward. output_gradient: the gradient of the chunk's output."""

    def after_backward(self, micro: MicroStep, input_gradient: Any) -> None:
        """Observes the end of a microbatch's backward. input_gradient: the gradient of the chunk's input."""


class Loss(Protocol):
    """Computes the sum of a loss over samples and the weight of the samples, so that the scale of a gradient does not depend on
    the layout.

    A step's gradient is the sum of d(loss)/dw over all samples, divided once by the weight of the global batch. The run
    enforces three rules. The weight must not depend on the output, because the run needs it before the first backward. The
    weight of a batch must be the sum of its microbatches' weights. The loss must not have parameters; put them into the last
    layer.

    An optional attribute `fields` names the batch fields that the loss reads; only these are moved to the device. An optional
    method `attach(parts)` is called once, when all groups exist, and may add numbers to metrics rows. Evaluations call `loss`
    without gradients. If a microbatch mixes several data sources, a shallow copy of the loss is called for each source.
    """

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Returns the weight of these samples, computed on the CPU: for cross-entropy, the number of labels to predict."""
        ...

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the **sum** of the loss over the samples in `batch`, a scalar tensor. output: the output of the model."""
        ...


@runtime_checkable
class SplitLogits(Protocol):
    """The logits that the last layer returns when they are not one tensor, because ranks split the classes or the loss computes
    the logits in chunks of tokens.

    Only a loss whose record declares `split_logits` receives them. A last layer that adds a term to the loss, such as a term of
    its routers, returns an object of its own class, whose `cross_entropy` includes the term. An optional attribute
    `is_collective` says whether `cross_entropy` and `logits` are collectives of the ranks that split the classes; without it,
    they are.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's logits over all classes, [..., classes]."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        """Returns the sum of the cross-entropy over this rank's `labels` int64 [...], computed in fp32 or wider. Labels equal
        to `ignore_index` do not count. smoothing: the share of the target probability that is spread evenly over all classes.
        In the backward, the gradient of the result is 1 / weight of the global batch.
        """
        ...

    def logits(self) -> Tensor:
        """Returns this rank's logits over all classes, [..., classes], without a graph."""
        ...


@runtime_checkable
class AttachedModule(Protocol):
    """A layer's module that adds numbers to each metrics row, or exchanges values with other ranks."""

    def attach_to_run(self, parts: Parts) -> None:
        """Adds the numbers by `parts.numbers.add`, and stores the groups to exchange values with. Called once on each rank that
        has the layer.
        """


class ActivationPolicy(Protocol):
    """Decides which tensors a layer saves for its backward. Evaluations call `begin` but not `call`. Order of calls: `attach`
    once; for each step, `begin` and then any number of `call`s; finally `detach`.
    """

    def attach(self, parts: Parts) -> None:
        """Prepares the policy for the run, for example its buffers. Called once, before the first step. A partitioner that
        times layers uses `call` without calling `attach`.
        """
        return

    def compiled_forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function to compile as the forward of the layer `name`. `call` then receives the compiled layer."""
        return forward

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Discards the tensors that a failed step saved. Called before a step or an evaluation runs `actions`.

        phase: `Phase.TRAIN` before a step, `Phase.EVALUATE` before an evaluation.
        """
        return

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Returns `layer(*args, **fields)`, and chooses the tensors that autograd saves. name: the layer. micro: the call."""
        ...

    def detach(self) -> None:
        """Frees the memory of the policy. Called when the run closes or its assembly fails."""
        return


@runtime_checkable
class Counts(Protocol):
    """Reports statistics; for gradient handlers, weight communicators, stage links, scheduler hooks, policies and pools.

    `Run.counts` collects the numbers after the last step. `summary.json` contains the numbers of rank 0, and `train-cli run -v`
    prints them. Objects that communicate report `sent_bytes_per_step`, which `api.comm.SentBytes` counts.
    """

    def counts(self) -> Mapping[str, float]:
        """Returns numbers by name; the name contains the unit (`gathered_bytes_per_step`). Must not communicate."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Saves state in checkpoints. A gradient handler, weight communicator, stage link, scheduler hook or policy must implement
    this protocol if later steps depend on state that the object keeps between steps.

    A checkpoint stores the state of each rank. The run restores the state only in the same layout.
    """

    def saved_state(self) -> Mapping[str, Tensor]:
        """Returns this rank's state by name, as live tensors. Called between two steps; must not communicate."""
        ...

    def restore_saved_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores a result of `saved_state`, on the CPU; {} resets the object. Called on all ranks, between two steps."""
        ...


@runtime_checkable
class MetricsWriter(Protocol):
    """Receives one row per optimizer step, on rank 0."""

    def write(self, row: Mapping[str, float | int]) -> None:
        """Writes `row`, which has the metrics of one step by name."""

    def close(self) -> None:
        """Writes all rows that are still queued, and closes the output. Called when the run closes."""


@runtime_checkable
class RewindableWriter(Protocol):
    """A metrics writer whose output a resumed run can continue."""

    def rewind(self, step: int) -> None:
        """Removes the rows of all steps after `step`, which the resumed run repeats."""


class RestoreResult(NamedTuple):
    """The result of `Run.load_checkpoint`. path: the path of the checkpoint. step: the number of completed optimizer steps.
    lineage: the attempts that ran these steps (`SavedRun.lineage`). notes: messages for the user. damaged_checkpoints: the
    newer checkpoints that were skipped: the path of each, and the damage found in it.
    """

    path: str
    step: int
    lineage: Lineage
    notes: list[str]
    damaged_checkpoints: Sequence[tuple[str, Sequence[object]]] = ()


class Checkpointer(Protocol):
    """Saves and restores a run, on each of its ranks. The plan's `[checkpoint]` table names it. All ranks call each method
    together, between two steps, except `copy_unwritten_state`, `counts` and `close`.

         probe ──> (is_due ──> start_save)* ──> finish_training ──> close        save, load: whenever the program asks

    A checkpointer must implement `save` and `load`. With the defaults of the other methods, a run saves only when the program
    calls `save`.
    """

    def save(self, path: str | Path | None, step: int) -> str:
        """Writes a checkpoint of the run after `step` steps; returns its path or URL once it is complete on all ranks.

        path: None selects the next path in the run's checkpoint folder (`TrainingState.folder`). For such a save, the method
        calls `TrainingState.attempt.begin(step)` before it saves, and `attempt.record_save(step)` afterwards. Raises RunError
        "checkpoint-failed" on all ranks if the checkpoint cannot be written.
        """
        ...

    def load(self, path: str | Path, *, allow_fresh_start: bool) -> RestoreResult | None:
        """Restores the run by `TrainingState.restore` and describes the checkpoint; returns None if "auto" finds no checkpoint.

        path: a checkpoint; a folder, whose newest intact checkpoint is loaded; or "auto", for the newest checkpoint of
        this run. allow_fresh_start: whether "auto" may return None although the run has already trained; if not,
        `AttemptTracker.refuse_fresh_start` raises. Raises RunError "no-checkpoint", "checkpoint-damaged" or the errors of
        `TrainingState.restore` on all ranks, with nothing changed.
        """
        ...

    def probe(self) -> None:
        """Raises RunError on all ranks if later saves would fail. Called before the first step of `Run.train`."""
        return

    def is_due(self, step: int) -> bool:
        """Returns whether to save after `step`; the result must be the same on all ranks."""
        return False

    def wants_save(self) -> bool:
        """Returns whether this rank votes to save after this step. One vote causes `request_save` on all ranks."""
        return False

    def request_save(self) -> None:
        """Makes the next `is_due` return True. Called on all ranks after at least one rank has voted for a save."""
        return

    def start_save(self, step: int) -> None:
        """Starts the save that is due, which may finish later. If it fails, adds a note to `TrainingState.notes`."""
        self.save(None, step)

    def finish_training(self, step: int, *, was_stopped: bool) -> None:
        """Finishes the save in progress and saves the run. Called after the last step of `Run.train`. was_stopped: whether a
        rank has asked to stop before the plan's last step.
        """
        return

    def copy_unwritten_state(self) -> None:
        """Copies the tensors that the save in progress has not read yet. Called before weights, their full-precision copies or
        optimizer states change or move. Must not communicate.
        """
        return

    def counts(self) -> Mapping[str, float]:
        """Returns numbers by name; the name contains the unit (`seconds_blocked`)."""
        return {}

    def close(self) -> None:
        """Finishes the save in progress if that is possible without the other ranks. Must not communicate."""
        return


class CheckpointFiles(Protocol):
    """Reads checkpoints without a run, for the command line. Paths may be URLs."""

    def names(self, folder: str) -> list[str]:
        """Returns the names of the complete checkpoints in `folder`, newest first."""
        ...

    def describe(self, path: str) -> SavedRun | None:
        """Returns the description of the checkpoint `path`, or None if there is none. Raises RunError "checkpoint-damaged"."""
        ...

    def is_intact(self, path: str) -> bool:
        """Returns whether the checkpoint at `path` is intact. Reads all of its files."""
        ...

    def open(self, path: str) -> CheckpointReader | None:
        """Returns the checkpoint at `path`. If `path` is a folder of checkpoints, returns the newest intact one, or None. Reads
        all files once. Raises RunError "checkpoint-damaged" if a file has changed since it was written.
        """
        ...
