"""What a chunk holds of one micro-batch between its forward and its backward, and how values enter and leave chunks.

    received ──enters──> inputs ──> chunk ──> output ──> sent; its storage is freed once nothing else needs it
                 └ its gradient              └ edges: where the backward will start

Keeping `GradientEdge`s instead of outputs frees the storage of a sent output, views included. Inputs are kept alive only by
what needs them (autograd, a layer that stores them), not from here.

    previous chunk ──give──> [ link | this rank's memory ] ──bring──> this chunk

Outputs travel in the flow `forward`, gradients in `backward`, over the stage link or directly between chunks of one stage.
Received tensors may lie in the link's memory, which the link reuses once nothing refers to them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from sley_core.actions.action import Flow, Transfer
from sley_core.engine.boundary import Description, Leaf, flatten, unflatten
from sley_core.errors import RunError
from sley_core.model.tensors import version_of

if TYPE_CHECKING:
    from sley_core.actions.action import Placement, StageChunk
    from sley_core.protocols import StageLink


class Input:
    """Holds one input tensor until the chunk takes it, and then its gradient, once the backward has reached it."""

    __slots__ = ("device", "gradient", "leaf", "tensor")

    def __init__(self, leaf: Leaf, tensor: Tensor) -> None:
        self.leaf = leaf
        self.device = tensor.device
        self.tensor: Tensor | None = tensor
        self.gradient: Tensor | None = None

    def enter(self) -> Tensor:
        """Returns the tensor, and drops the reference; call once. If it needs a gradient, the graph ends here."""
        assert self.tensor is not None, "entered twice"
        if self.leaf.has_gradient and torch.is_grad_enabled():
            entered: Tensor = _Enter.apply(_ROOT, self)  # type: ignore[no-untyped-call]  # torch's
        else:
            entered = self.tensor.detach()
        self.tensor = None
        return entered

    def take_gradient(self) -> Tensor:
        """Returns the gradient, and drops the reference; zeros if the backward did not reach the input."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return torch.zeros(self.leaf.shape, dtype=self.leaf.dtype, device=self.device)
        return gradient


class _Enter(torch.autograd.Function):
    """Is the root of a chunk's graph: gives the input tensor a history that ends here.

    A leaf would do if layers did not write to their inputs (`ReLU(inplace=True)`), which autograd forbids on a leaf and on a
    view of one. This tensor is neither, and it shares its version counter with the input: if a layer overwrites an output of
    the same stage that an earlier graph has saved, autograd raises an error, as it does in one process.
    """

    @staticmethod
    def forward(ctx: Any, _root: Tensor, came: Input) -> Tensor:
        assert came.tensor is not None, came.leaf
        ctx.came = came
        return came.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        came: Input = ctx.came
        (gradient,) = gradients
        came.gradient = gradient if came.gradient is None else came.gradient + gradient
        return None, None


_ROOT = torch.empty(0, requires_grad=True)


@dataclass
class InFlight:
    """Holds one chunk and one micro-batch in flight.

    inputs: the received tensors. description: of them; None on the first chunk. loss: the sum over the micro-batch, on the last
    chunk. edges: on other chunks, of the outputs that have a gradient.
    """

    inputs: list[Input] = field(default_factory=list)
    description: Description | None = None
    edges: list[GradientEdge] = field(default_factory=list)
    loss: Tensor | None = None
    _watched: list[tuple[Tensor, int]] = field(default_factory=list)

    def enter(self, description: Description, tensors: Sequence[Tensor]) -> Any:
        """Returns the value to call the chunk with, rebuilt from the received `tensors`; its graph begins there."""
        self.description = description
        self.inputs = [Input(*pair) for pair in zip(description.leaves, tensors, strict=True)]
        entered: list[Tensor] = []
        for came in self.inputs:
            first = came.leaf.same_as
            entered.append(came.enter() if first is None else entered[first])
            if came.leaf.overlaps:
                self._watched.append((entered[-1], version_of(entered[-1])))
        return unflatten(entered, description.structure)

    def check_unwritten(self, layer: str) -> None:
        """Raises RunError `boundary-overlap` if the chunk wrote in place to an input that overlapped with another where it was
        made.
        """
        watched, self._watched = self._watched, []
        if any(version_of(tensor) != version for tensor, version in watched):
            raise RunError(
                "boundary-overlap",
                f"a stage that begins with the layer {layer!r} writes in place to a tensor that overlaps with another one that "
                "it was given: they came from another stage, as copies that do not overlap",
                hint="write to a `clone()` of it, or let the layer before return a `clone()`",
            )

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Runs this chunk's backward from `gradients` of its outputs, and frees its graph. Returns the gradients of its inputs,
        zeros where autograd made none. Raises RunError `no-gradient` for a loss that depends on no trained parameter.
        """
        if self.loss is not None:
            if not self.loss.requires_grad:
                raise RunError(
                    "no-gradient",
                    "the loss of a micro-batch depends on no parameter that is trained",
                    hint="a layer or the loss detaches what it is given, or all that the micro-batch uses is frozen",
                )
            if self.loss.ndim:
                torch.autograd.backward(self.loss, gradients[0])  # no scalar: raises torch's error
            # `torch.autograd.backward` would check the shape, which imports sympy: a third of a second.
            _engine_run_backward((self.loss,), (gradients[0],), False, False, (), allow_unreachable=True, accumulate_grad=True)
        elif self.edges:
            torch.autograd.backward(self.edges, list(gradients))
        # The edges own the graph: dropping them frees what autograd saved, and the weights' stand-ins.
        self.loss, self.edges = None, []
        return [came.take_gradient() for came in self.inputs if came.leaf.has_gradient]


def describe(value: Any, layer: str = "") -> tuple[Description, list[Tensor]]:
    """Returns the description of a chunk's output, and its tensors in order. layer: the chunk's last, for an error."""
    tensors, structure = flatten(value, layer)
    firsts: dict[int, int] = {}
    leaves = []
    for at, tensor in enumerate(tensors):
        first = firsts.setdefault(id(tensor), at)
        if first == at:
            leaves.append(Leaf(tensor.dtype, tuple(tensor.shape), tensor.requires_grad))
        else:
            leaves.append(Leaf(tensor.dtype, tuple(tensor.shape), has_gradient=False, same_as=first))
    return Description(tuple(leaves), structure), tensors


def edges_of(description: Description, tensors: Sequence[Tensor]) -> list[GradientEdge]:
    """Returns where the backward of an output starts: the gradient edge of each of `tensors` that will receive a gradient."""
    pairs = zip(description.leaves, tensors, strict=True)
    return [get_gradient_edge(tensor) for leaf, tensor in pairs if leaf.has_gradient]


Payload = tuple[Description, list[Tensor]]
Spot = tuple[Flow, int, int]
"""Flow, chunk of this stage, micro-batch."""


class Crossing:
    """Moves values over the boundaries of one stage's chunks. link: None if there is only one stage."""

    def __init__(self, placement: Placement, stage: int, link: StageLink | None) -> None:
        self.placement = placement
        self.stage = stage
        self.link = link
        sides = (placement.previous, placement.next)
        peers = [side(stage, chunk) for chunk in range(placement.chunks) for side in sides]
        self._neighbours = tuple(sorted({peer.stage for peer in peers if peer is not None} - {stage}))
        self._keys: Sequence[Hashable] = ()
        self._outgoing: dict[Spot, Payload] = {}
        self._handed: dict[Spot, Payload] = {}

    def begin(self, keys: Sequence[Hashable]) -> None:
        """Starts a list of actions; discards a failed one's values. keys: per micro-batch, all that determines its shapes."""
        if self._outgoing or self._handed:
            self.abort("the step before did not end")
        self._keys = keys
        if self.link is not None:
            self.link.begin(keys, self._neighbours)

    def transfer(self, step: Transfer) -> None:
        """Posts the receive, or starts the send, that the list's entry `step` names. Does not block."""
        assert self.link is not None, f"{step} without a link"
        if step.op == "post":
            self.link.post(step, self._keys[step.micro])
        else:
            description, tensors = self._outgoing.pop((step.flow, step.chunk, step.micro))
            self.link.send(step, description, tensors, self._keys[step.micro])

    def bring(self, flow: Flow, chunk: int, micro: int) -> Payload:
        """Returns what enters `chunk`: the previous chunk's output, or the gradients of its own. Waits for the link."""
        spot = (flow, chunk, micro)
        if spot in self._handed:
            return self._handed.pop(spot)
        assert self.link is not None, f"nothing for {spot}"
        peer = self._peer(flow, chunk)
        return self.link.take(Transfer("post", flow, chunk, micro, peer.stage, peer.chunk))

    def give(self, flow: Flow, chunk: int, micro: int, payload: Payload) -> None:
        """Keeps what leaves `chunk` for the neighbour. If that is on another stage, the list's next entry, a send, sends it."""
        peer = self._peer("backward" if flow == "forward" else "forward", chunk)
        if peer.stage == self.stage:
            self._handed[flow, peer.chunk, micro] = payload
        else:
            self._outgoing[flow, chunk, micro] = payload

    def end(self) -> None:
        """Waits until everything is sent."""
        assert not self._outgoing, f"made and never sent: {list(self._outgoing)}"
        if self.link is not None:
            self.link.drain()

    def abort(self, why: str) -> None:
        """Discards all values in flight after a failure, without waiting for peers. why: for the peers' error messages."""
        self._outgoing.clear()
        self._handed.clear()
        if self.link is not None:
            self.link.abort(why)

    def _peer(self, flow: Flow, chunk: int) -> StageChunk:
        """Returns the chunk, and its stage, from which values of `flow` come into `chunk`."""
        source = self.placement.previous if flow == "forward" else self.placement.next
        peer = source(self.stage, chunk)
        assert peer is not None, f"chunk {chunk} of stage {self.stage} is at the model's end"
        return peer
