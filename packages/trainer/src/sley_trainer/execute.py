"""Executes a rank's list of actions, and holds the values of a model chunk between its forward and its backward.

    batch, on the host ──moved at its first action──> fields ──┐
    previous chunk ──link, or this rank's memory──> inputs ──> chunk ──> output ──> next chunk, or the loss
                                                     └ gradients            └ edges: where the backward starts

Between forward and backward a chunk holds its inputs and the `GradientEdge`s of its outputs, but not the outputs, so a sent
output can be freed. Received tensors may share the memory of the link. The device fields of a microbatch are freed at its end.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.profiler import record_function

from sley_core.actions.action import Action, Flow, Kind, LoweredList, Placement, StageChunk, Transfer, select_actions
from sley_core.data.dataset import SOURCE, Batch, Field
from sley_core.engine.agreement import check_fields
from sley_core.engine.boundary import Description, Leaf, flatten, unflatten
from sley_core.engine.call import LayerCaller, call_hooks, note_function
from sley_core.engine.gradients import GradientStore
from sley_core.engine.parts import MicroStep, Parts, Phase, StepState
from sley_core.engine.step_batch import BatchWeight, PositionAdditivity, WholeSequences
from sley_core.errors import RunError
from sley_core.generators import wait_for_seeded_reads
from sley_core.model.layers import Layer
from sley_core.model.tensors import version_of
from sley_core.protocols import Loss, SchedulerHook, SplitLogits, StageLink, WeightCommunicator
from sley_trainer.evaluation import Tally
from sley_trainer.row_metrics import SourceSums


@dataclass(eq=False)
class ListRun:
    """The inputs and values of one run of a list of actions.

    batch: this rank's microbatches, on the host. store: accumulates the gradients of a training list; None for an evaluation.
    weight: the divisor of every gradient; None on ranks without the loss. outputs: receives the model's output of each
    microbatch on ranks with the loss; None discards the outputs. A training list stores copies, since the loss may write in
    place; an evaluation with `outputs` computes no loss. tally: adds up the metrics. num_counted: the number of microbatches,
    from the first, whose losses are added; None for all. fields: the fields of each microbatch in progress, on the device.
    chunk_states: the values of each (chunk, microbatch) between its first and last action. total: the sum of the losses, or one
    loss per microbatch.
    """

    batch: Sequence[Batch]
    store: GradientStore | None = None
    weight: BatchWeight | None = None
    outputs: dict[int, Any] | None = None
    tally: Tally | None = None
    num_counted: int | None = None
    fields: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False)
    chunk_states: "dict[tuple[int, int], ChunkState]" = field(default_factory=dict, init=False)
    total: Tensor = field(init=False)

    @property
    def phase(self) -> Phase:
        return Phase.EVALUATE if self.store is None else Phase.TRAIN


@dataclass(eq=False)
class Executor:
    """Executes lists of actions over `chunks`, the layers of each model chunk on this rank.

    boundaries: moves values between chunks. caller: calls layers. communicator: gathers sharded weights. fields: the declared
    batch fields. position_check: checks the loss if ranks have slices of sequences. whole_sequences: gathers full sequences for
    the loss. sources: sums the losses by data source. is_unfinished: whether a list is running or has failed, so that its
    exchanges may be in flight until the next list begins. keeps_micro_losses: whether `run` returns the loss of each
    microbatch, [microbatches], instead of the sum of the losses. has_loss: whether this rank holds the model's last chunk.
    """

    parts: Parts
    chunks: Sequence[Sequence[Layer]]
    boundaries: "StageBoundaries"
    caller: LayerCaller
    loss: Loss
    fields: Mapping[str, Field]
    communicator: WeightCommunicator | None
    position_check: PositionAdditivity | None
    whole_sequences: WholeSequences | None
    sources: SourceSums | None = field(default=None, init=False)
    is_unfinished: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.device, self.queue, self.head = self.parts.world.device, self.parts.queue, self.parts.head
        self.hooks: Sequence[SchedulerHook] = self.caller.hooks
        self.keeps_micro_losses = self.parts.store.reduction.has_fixed_order
        self.has_loss = any(self._is_last_chunk(chunk) for chunk in range(len(self.chunks)))
        read_fields = {name for layers in self.chunks for layer in layers for name in layer.fields}
        if self.has_loss:
            loss_fields = getattr(self.loss, "fields", None)
            read_fields.update(self.fields if loss_fields is None else loss_fields)
        self._field_names = frozenset(read_fields)

    def run(self, entries: LoweredList, state: StepState, run: ListRun) -> Tensor:
        """Runs a list with its exchanges, and first discards the values of a list that failed. Returns the sum of the losses of
        this rank's samples, or, if `keeps_micro_losses`, one loss per microbatch, float64 on the device. The caller disables
        autograd for an evaluation. All ranks must call it in the same order. Raises RunError "data-timeout".
        """
        shape = (len(run.batch),) if self.keeps_micro_losses else ()
        run.total = torch.zeros(shape, dtype=torch.float64, device=self.device.torch_device)
        if run.tally is not None:
            run.tally.begin(run.total)
        actions = select_actions(entries)
        wait_for_seeded_reads(self.parts.limits.data_timeout_s)
        self.is_unfinished = True
        torch.clear_autocast_cache()  # in the program's `torch.autocast`, casts of old weights would be used again
        self.queue.clear()
        if self.communicator is not None:
            self.communicator.begin(actions, run.phase)
        self.caller.policy.begin(actions, run.phase)
        # The keys contain all values that determine the shapes at the boundaries of each microbatch.
        has_link = self.boundaries.link is not None
        self.boundaries.begin(
            [(run.phase, *(tuple(value.shape) for value in micro.values())) for micro in run.batch] if has_link else []
        )
        self._run_entries(entries, actions, state, run)
        self.boundaries.wait_for_sends()
        torch.clear_autocast_cache()
        self.is_unfinished = False
        return run.total

    def _run_entries(self, entries: LoweredList, actions: Sequence[Action], state: StepState, run: ListRun) -> None:
        """Runs each entry of the list, and frees the values of a chunk or microbatch after its last action."""
        last_of_micro = {action.micro: action for action in actions}
        last_of_chunk = {(action.chunk, action.micro): action for action in actions}
        is_profiled = torch._C._autograd._profiler_enabled()
        for entry in entries:
            state.step_progress.begin_entry(f"{entry} in the evaluation" if run.store is None else entry)
            if isinstance(entry, Transfer):
                self.boundaries.transfer(entry)
                continue
            if entry.kind is Kind.CHUNK_DONE:
                assert run.store is not None, entry
                run.store.chunk_done(entry.chunk)
                continue
            micro = state.micro_step(entry, run.phase)
            state.enter(entry)
            with (
                record_function(str(entry)) if is_profiled else nullcontext(),
                nullcontext() if self.communicator is None else self.communicator.wrap_action(entry),
            ):
                self._run_action(entry.kind, micro, run)
            if run.store is not None:
                run.store.backward_done()
            state.leave(entry)
            if last_of_chunk[entry.chunk, entry.micro] == entry:
                del run.chunk_states[entry.chunk, entry.micro]
            if last_of_micro[entry.micro] == entry:
                run.fields.pop(entry.micro, None)

    def _run_action(self, kind: Kind, micro: MicroStep, run: ListRun) -> None:
        """Runs one compute action for the chunk and microbatch of `micro`."""
        key = micro.chunk, micro.micro
        match kind:
            case Kind.FORWARD:
                chunk_state = run.chunk_states[key] = ChunkState()
                with nullcontext() if self.head is None else self.head.expect_loss(run.weight):
                    self._forward(micro, chunk_state, run)
            case Kind.BACKWARD:
                self._backward(micro, run.chunk_states[key], run.weight)
            case Kind.INPUT_GRADIENT:
                with self.queue.collect(key):
                    self._backward(micro, run.chunk_states[key], run.weight)
            case Kind.WEIGHT_GRADIENT:  # computes the products that INPUT_GRADIENT deferred; no tensor crosses a stage boundary
                weights_step = replace(micro, phase=Phase.WEIGHTS)
                call_hooks(self.hooks, "before_backward", weights_step, None)
                self.queue.run(key)
                call_hooks(self.hooks, "after_backward", weights_step, None)

    def _forward(self, micro: MicroStep, chunk_state: "ChunkState", run: ListRun) -> None:
        """Runs the chunk's forward, and sends the output or computes the loss. Stores the start of the backward in
        `chunk_state`.
        """
        batch = run.batch[micro.micro]
        if micro.micro not in run.fields:
            moved = {name: self.device.move(value) for name, value in batch.items() if name in self._field_names}
            run.fields[micro.micro] = moved
        fields = run.fields[micro.micro]
        layers = self.chunks[micro.chunk]
        args: tuple[Any, ...] = ()
        if self.boundaries.placement.previous(self.boundaries.stage, micro.chunk) is not None:
            args = (chunk_state.build_input(*self.boundaries.receive("forward", micro.chunk, micro.micro)),)
        call_hooks(self.hooks, "before_forward", micro, args[0] if args else None)
        versions = [version_of(value) for value in fields.values()]
        for layer in layers:
            args = (self.caller(layer, args, {name: fields[name] for name in layer.fields}, micro),)
        if self.boundaries.link is not None:
            check_fields(layers, fields, versions)
        (output,) = args
        chunk_state.check_inputs_unmodified(layers[0].name)
        call_hooks(self.hooks, "after_forward", micro, output)
        if not self._is_last_chunk(micro.chunk):
            description, tensors = describe_output(output, layers[-1].name)
            chunk_state.edges = find_gradient_edges(description, tensors)
            self.boundaries.send("forward", micro.chunk, micro.micro, (description, [tensor.detach() for tensor in tensors]))
            return
        is_prediction = run.outputs is not None and run.store is None
        if run.outputs is not None:
            run.outputs[micro.micro] = _detach_output(output, layers[-1].name, clone=not is_prediction)
        if is_prediction:
            return
        is_counted = run.num_counted is None or micro.micro < run.num_counted
        if run.tally is not None:
            self._count_metrics(run.tally, micro, output, batch, is_counted=is_counted)
        chunk_state.loss = self._compute_loss(micro, output, fields, batch)
        if is_counted and (self.whole_sequences is None or self.whole_sequences.is_counted):
            loss_sum = run.total[micro.micro] if self.keeps_micro_losses else run.total
            loss_sum += chunk_state.loss.detach()

    def _count_metrics(self, tally: Tally, micro: MicroStep, output: Any, batch: Batch, *, is_counted: bool) -> None:
        """Moves the fields that the metrics read to the device, and adds the metrics of one microbatch to `tally`."""
        with note_function("the metrics", micro, tally.metrics.custom_metric):
            output = _detach_output(output, self.chunks[micro.chunk][-1].name, clone=False)
            fields = {name: self.device.move(value) for name, value in batch.items() if tally.may_read(name)}
            tally.add(micro.micro, output, fields, batch, is_counted=is_counted)

    def _compute_loss(self, micro: MicroStep, output: Any, fields: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the loss of one microbatch, or of its full sequences. batch: all fields of the microbatch, on the host."""
        call_hooks(self.hooks, "before_loss", micro, output)
        if self.whole_sequences is not None:
            output, fields = self.whole_sequences(output, fields, batch)
        with note_function("the loss", micro, self.loss):
            if self.whole_sequences is not None:
                self.caller.seed_generators_for_loss(micro)
            loss = require_scalar(self.loss.loss(output, fields))
            if self.sources is not None and self.sources.splitter.computes_weight and micro.phase is Phase.TRAIN:
                self.sources.add(micro.micro, output, fields, batch[SOURCE], loss)
        if self.position_check is not None:
            self.position_check.check(output, fields)
        call_hooks(self.hooks, "after_loss", micro, loss)
        return loss

    def _backward(self, micro: MicroStep, chunk_state: "ChunkState", weight: BatchWeight | None) -> None:
        """Runs the chunk's backward from the loss or the output gradients, and sends input gradients to the previous chunk."""
        if chunk_state.loss is not None:
            assert weight is not None, "the loss, but not its weight"
            gradients = [weight.inverse(chunk_state.loss)]
        else:
            _, gradients = self.boundaries.receive("backward", micro.chunk, micro.micro)
        call_hooks(self.hooks, "before_backward", micro, gradients if chunk_state.loss is None else gradients[0])
        input_gradients = chunk_state.backward(gradients)
        call_hooks(self.hooks, "after_backward", micro, None if chunk_state.description is None else input_gradients)
        if chunk_state.description is not None:
            self.boundaries.send("backward", micro.chunk, micro.micro, (chunk_state.description.gradients, input_gradients))

    def _is_last_chunk(self, chunk: int) -> bool:
        return self.boundaries.placement.next(self.boundaries.stage, chunk) is None


def require_scalar(loss: Any) -> Tensor:
    """Returns `loss`, the result of a user's loss. Raises RunError "loss-shape" if it is not a tensor without dims."""
    if isinstance(loss, Tensor) and not loss.ndim:
        return loss
    shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a value of type {type(loss).__name__}"
    message = f"a loss must return one number per microbatch, as a tensor without dims, but returned {shape}"
    raise RunError(
        "loss-shape", message, path=("loss",), hint="return the sum over all samples or tokens, such as `losses.sum()`"
    )


@torch.no_grad()
def _detach_output(output: Any, layer: str, *, clone: bool) -> Any:
    """Returns the model's output without its graph. For a `SplitLogits`, all ranks gather the full logits. layer: the last
    layer, which RunError "boundary-type" names. clone: whether to copy other tensors.
    """
    if not isinstance(output, Tensor) and isinstance(output, SplitLogits):
        return output.logits()
    tensors, structure = flatten(output, layer)
    return unflatten([tensor.detach().clone() if clone else tensor.detach() for tensor in tensors], structure)


@dataclass(eq=False, slots=True)
class ChunkInput:
    """The gradient of one input of a chunk, which the backward sets. leaf: describes the input. device: the input's device."""

    leaf: Leaf
    device: torch.device
    gradient: Tensor | None = None

    def pop_gradient(self) -> Tensor:
        """Returns the gradient, or zeros if the backward did not reach the input, and drops the reference to it."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return torch.zeros(self.leaf.shape, dtype=self.leaf.dtype, device=self.device)
        return gradient


class _GraphStart(torch.autograd.Function):
    """The root of a chunk's autograd graph. The forward returns an alias of `tensor`; the backward stores its gradient in
    `entry`.

    A graph cannot start at a leaf, since layers write to their inputs (`ReLU(inplace=True)`), which autograd forbids on a leaf
    and on a view of a leaf. The result shares its version counter with the input: if a layer overwrites an output of the same
    stage that an earlier graph has saved, autograd raises an error, as it does in one process.
    """

    @staticmethod
    def forward(ctx: Any, _root: Tensor, tensor: Tensor, entry: ChunkInput) -> Tensor:
        ctx.entry = entry
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        entry: ChunkInput = ctx.entry
        (gradient,) = gradients
        entry.gradient = gradient if entry.gradient is None else entry.gradient + gradient
        return None, None, None


_ROOT = torch.empty(0, requires_grad=True)  # makes autograd record `_GraphStart`


@dataclass
class ChunkState:
    """The values of one chunk and one microbatch between forward and backward. inputs, description: the received inputs; empty
    on the first chunk. edges: the graph edges of outputs that get a gradient. loss: the loss on the last chunk, which has no
    edges; else None.
    """

    inputs: list[ChunkInput] = field(default_factory=list)
    description: Description | None = None
    edges: list[GradientEdge] = field(default_factory=list)
    loss: Tensor | None = None
    _watched: list[tuple[Tensor, int]] = field(default_factory=list)

    def build_input(self, description: Description, tensors: Sequence[Tensor]) -> Any:
        """Returns the chunk's input, rebuilt from the received `tensors`, at which the chunk's autograd graph then starts."""
        self.description = description
        tensors_in_graph: list[Tensor] = []
        for leaf, tensor in zip(description.leaves, tensors, strict=True):
            self.inputs.append(ChunkInput(leaf, tensor.device))
            if leaf.same_as is not None:
                tensors_in_graph.append(tensors_in_graph[leaf.same_as])
            elif leaf.has_gradient and torch.is_grad_enabled():
                tensors_in_graph.append(_GraphStart.apply(_ROOT, tensor, self.inputs[-1]))  # type: ignore[no-untyped-call]
            else:
                tensors_in_graph.append(tensor.detach())
            if leaf.overlaps:
                self._watched.append((tensors_in_graph[-1], version_of(tensors_in_graph[-1])))
        return unflatten(tensors_in_graph, description.structure)

    def check_inputs_unmodified(self, layer: str) -> None:
        """Raises RunError "boundary-overlap" if the chunk wrote to an input that overlaps with another one on the sender."""
        watched, self._watched = self._watched, []
        if any(version_of(tensor) != version for tensor, version in watched):
            message = (
                f"the layer {layer!r}, the first of its stage, writes in place to a received tensor that overlaps with "
                "another one on the sending stage; the received tensors are copies that do not overlap"
            )
            hint = "write to a `clone()` of the tensor, or return a `clone()` from the previous layer"
            raise RunError("boundary-overlap", message, hint=hint)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Runs this chunk's backward from `gradients` of its outputs, and frees its graph. Returns the gradients of its inputs;
        zeros for an input that the backward did not reach. torch raises RuntimeError for a loss that depends on no trained
        parameter.
        """
        if self.loss is not None:
            # `torch.autograd.backward` would check the shape, which imports sympy and takes a third of a second.
            _engine_run_backward((self.loss,), (gradients[0],), False, False, (), allow_unreachable=True, accumulate_grad=True)
        elif self.edges:
            torch.autograd.backward(self.edges, list(gradients))
        # The edges own the graph: dropping them frees the tensors that autograd saved.
        self.loss, self.edges = None, []
        return [entry.pop_gradient() for entry in self.inputs if entry.leaf.has_gradient]


def describe_output(value: Any, layer: str = "") -> tuple[Description, list[Tensor]]:
    """Returns the description of a chunk's output, and its tensors in order. layer: the chunk's last layer, for errors."""
    tensors, structure = flatten(value, layer)
    first_indices: dict[int, int] = {}
    leaves = []
    for index, tensor in enumerate(tensors):
        first_index = first_indices.setdefault(id(tensor), index)
        is_first = first_index == index
        shape = tuple(tensor.shape)
        leaves.append(Leaf(tensor.dtype, shape, is_first and tensor.requires_grad, None if is_first else first_index))
    return Description(tuple(leaves), structure), tensors


def find_gradient_edges(description: Description, tensors: Sequence[Tensor]) -> list[GradientEdge]:
    """Returns the gradient edges at which the backward starts: one for each of `tensors` that gets a gradient."""
    return [get_gradient_edge(tensor) for leaf, tensor in zip(description.leaves, tensors, strict=True) if leaf.has_gradient]


Payload = tuple[Description, list[Tensor]]  # a value that crosses a boundary
ValueKey = tuple[Flow, int, int]
"""Identifies a value by its direction ("forward" or "backward"), the chunk of this stage, and the microbatch."""


class StageBoundaries:
    """Passes values between one stage's chunks and their neighbours. link: exchanges with other stages, or None."""

    def __init__(self, placement: Placement, stage: int, link: StageLink | None) -> None:
        self.placement = placement
        self.stage = stage
        self.link = link
        sides = (placement.previous, placement.next)
        peers = [side(stage, chunk) for chunk in range(placement.chunks) for side in sides]
        self._neighbours = tuple(sorted({peer.stage for peer in peers if peer is not None} - {stage}))
        self._keys: Sequence[Hashable] = ()
        self._outgoing: dict[ValueKey, Payload] = {}
        self._local: dict[ValueKey, Payload] = {}

    def begin(self, keys: Sequence[Hashable]) -> None:
        """Begins a list of actions, and discards a failed list. keys: the values that determine the shapes of a microbatch."""
        if self._outgoing or self._local:
            self.abort("the previous step did not end")
        self._keys = keys
        if self.link is not None:
            self.link.begin(keys, self._neighbours)

    def transfer(self, entry: Transfer) -> None:
        """Starts the receive or the send that the list entry describes, and does not wait for it."""
        assert self.link is not None, f"{entry} without a link"
        if entry.op == "post":
            self.link.post_receive(entry, self._keys[entry.micro])
        else:
            description, tensors = self._outgoing.pop((entry.flow, entry.chunk, entry.micro))
            self.link.send(entry, description, tensors, self._keys[entry.micro])

    def receive(self, flow: Flow, chunk: int, micro: int) -> Payload:
        """Returns the previous chunk's output ("forward") or the gradients of this chunk's output. May wait for a peer."""
        key = (flow, chunk, micro)
        if key in self._local:
            return self._local.pop(key)
        assert self.link is not None, f"nothing for {key}"
        peer = self._peer(flow, chunk)
        return self.link.receive(Transfer("post", flow, chunk, micro, peer.stage, peer.chunk))

    def send(self, flow: Flow, chunk: int, micro: int, payload: Payload) -> None:
        """Stores a value of `chunk` for its neighbour. If the neighbour is on another stage, a later list entry sends it."""
        peer = self._peer("backward" if flow == "forward" else "forward", chunk)
        if peer.stage == self.stage:
            self._local[flow, peer.chunk, micro] = payload
        else:
            self._outgoing[flow, chunk, micro] = payload

    def wait_for_sends(self) -> None:
        """Waits until all sends are done."""
        assert not self._outgoing, f"values that were not sent: {list(self._outgoing)}"
        if self.link is not None:
            self.link.drain()

    def abort(self, reason: str) -> None:
        """Discards all values in flight after a failure, without waiting. reason: the failure, for errors on other stages."""
        self._outgoing.clear()
        self._local.clear()
        if self.link is not None:
            self.link.abort(reason)

    def _peer(self, flow: Flow, chunk: int) -> StageChunk:
        """Returns the chunk from which `chunk` receives in the direction `flow`."""
        source = self.placement.previous if flow == "forward" else self.placement.next
        peer = source(self.stage, chunk)
        assert peer is not None, f"chunk {chunk} of stage {self.stage} is at the model's end"
        return peer
