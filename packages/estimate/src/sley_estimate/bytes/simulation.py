"""Takes the place of peers and values in a fake world whose ranks take steps.

Layers get tensors without values, exchanges take the memory that those of the plan's device take, and what other stages would
announce follows from the layers, which are called on meta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.comm.backends import installed_transports
from sley_core.comm.groups import Simulation, nothing
from sley_core.engine.boundary import Description, unflatten
from sley_core.engine.execute import describe
from sley_core.errors import RunError
from sley_core.model.layers import like
from sley_core.model.tensors import buffer_format, held_tensors
from sley_estimate.bytes.transports import Tell, imitated_transports
from sley_estimate.layers.distinct import kind_of
from train_cli.on_meta import meta_micro_batch, meta_output, meta_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist

    from sley_core.actions.action import Placement
    from sley_core.comm.groups import Exchange
    from sley_core.comm.progress import Members
    from sley_core.comm.transport import Transport
    from sley_core.data.dataset import AnyDataset
    from sley_core.engine.stage import Stage
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Collective
    from sley_estimate.bytes.fake_tensors import FakeTensors


_TOLD: Mapping[Exchange, Collective] = {
    **dict.fromkeys(("sum", "max", "min"), "sum"),
    **dict.fromkeys(("broadcast", "gather"), "gather"),
    "swap": "swap",
}
"""The kind of collective that a listener is told."""


class TakenSteps(Simulation):
    """Lets a rank take steps whose tensors `tensors` makes. kind: of the device on which the plan would run, "cpu" or "cuda":
    gloo takes memory beside what ranks exchange, and NCCL does not. listener: is told of each collective as it begins, and
    returns a function that is called where the rank waits for it.
    """

    def __init__(self, tensors: FakeTensors, kind: str) -> None:
        self.listener: Tell = _unheard
        self._kind = kind
        self._tensors = tensors

    def transports(self, members: Members, lanes: Mapping[str, dist.ProcessGroup], *, attaches: bool) -> dict[str, Transport]:
        records = installed_transports() if attaches else ()
        return imitated_transports(members, lanes, self._kind, self._began, records)

    def imitate(
        self, members: Members, kind: Exchange, result: Tensor, given: Tensor, lane: str, what: str
    ) -> Callable[[], None]:
        """Tells the listener of collectives; the lists of actions tell of messages."""
        return self._began(_TOLD[kind], members.axis, lane, result.nbytes) if kind in _TOLD else nothing

    def announced(self, plan: Plan, stage: Stage, dataset: AnyDataset, dtype: torch.dtype) -> Foretold | None:
        return foretold(plan, stage, dataset, dtype) if plan.parallel.pp > 1 else None

    def fill(self, layers: Sequence[Layer], dtype: torch.dtype) -> None:
        """Gives `layers` tensors without values, on the host."""
        with self._tensors:
            imagine(layers, dtype=dtype, device=torch.device("cpu"))

    def _began(self, kind: Collective, axis: str, lane: str, num_bytes: int) -> Callable[[], None]:
        return self.listener(kind, axis, lane, num_bytes)


def _unheard(kind: Collective, axis: str, lane: str, num_bytes: int) -> Callable[[], None]:
    return nothing


class Foretold:
    """Describes, when called with (stage, chunk), the output of that chunk. outputs: of each position of the model but the
    last.
    """

    def __init__(self, placement: Placement, outputs: Sequence[Description]) -> None:
        self._placement = placement
        self.outputs = outputs

    def __call__(self, stage: int, chunk: int) -> Description:
        """Returns the description of the output of a chunk that is not the last one."""
        return self.outputs[self._placement.position(stage, chunk)]


def foretold(plan: Plan, stage: Stage, dataset: AnyDataset, dtype: torch.dtype) -> Foretold:
    """Calls the layers on meta, and returns the descriptions of the outputs of all chunks but the last.

    stage: has all layers of the model, on meta and as they were built. dtype: of the parameters. Raises RunError
    `estimate-layer` for a layer that cannot be called on meta.
    """
    fields = meta_micro_batch(plan, dataset)
    known: dict[str, Any] = {}
    outputs: list[Description] = []
    args: tuple[Any, ...] = ()
    for _, layers in stage.stages[:-1]:
        for layer in layers:
            args = (_output_of_kind(layer, args, fields, meta_state(layer, dtype, plan.precision.keep), known),)
        description, tensors = describe(args[0], layers[-1].name)
        outputs.append(description)
        pairs = zip(description.leaves, tensors, strict=True)
        entered = [tensor.detach().requires_grad_(leaf.has_gradient) for leaf, tensor in pairs]
        args = (unflatten(entered, description.structure),)
    return Foretold(stage.lists.placement, outputs)


def _output_of_kind(layer: Layer, args: tuple[Any, ...], fields: Any, state: dict[str, Tensor], known: dict[str, Any]) -> Any:
    """Returns the layer's output for `args`. known: outputs by kind of layer and arguments; each kind is called once."""
    description, tensors = describe(args[0], layer.name) if args else (None, [])
    given = [(tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors]
    formats = [one.dtype for one in state.values()]
    kind = repr((kind_of(layer.module, layer.name), layer.fields, description, given, formats))
    if kind not in known:
        known[kind] = _output(layer, args, fields, state)
    return known[kind]


def _output(layer: Layer, args: tuple[Any, ...], fields: Any, state: dict[str, Tensor]) -> Any:
    """Returns the layer's output on meta; raises RunError `estimate-layer` if its forward raises."""
    try:
        return meta_output(layer, args, fields, state)
    except Exception as error:  # the user's forward may not work on meta
        first = str(error).strip().partition("\n")[0]
        raise RunError(
            "estimate-layer",
            f"the layer {layer.name!r} ({type(layer.module).__name__}) cannot be called without values: "
            f"{type(error).__name__}: {first}",
            hint="what a layer returns must follow from the shapes of what it is given",
        ) from error


def imagine(layers: Iterable[Layer], *, dtype: torch.dtype, device: torch.device) -> None:
    """Replaces the parameters of `layers`, on meta, and their buffers by new tensors on `device`, of the dtypes that
    `HostModel.place` gives them; shared tensors stay shared. Called where new tensors have no values.

    Other tensors on meta to which layers refer move to `device` in place.
    """
    layers = list(layers)
    registered = {id(module) for layer in layers for module in layer.module.modules()}
    own = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    for layer in layers:
        for held in held_tensors(layer.name, layer.module, registered):
            if held.tensor.is_meta and held.tensor.grad_fn is None and id(held.tensor) not in own:
                value = torch.empty_like(held.tensor, device=device)
                same = like(held.tensor, value) if isinstance(held.tensor, nn.Parameter) else value
                torch.utils.swap_tensors(held.tensor, same)  # type: ignore[no-untyped-call]  # torch's
    # By id of the old tensor, which is kept too, so that its id is not reused.
    parameters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in layers:
        for module in layer.module.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) not in parameters:
                    new = torch.empty(parameter.shape, dtype=dtype, device=device)
                    parameters[id(parameter)] = parameter, like(parameter, new)
                setattr(module, name, parameters[id(parameter)][1])
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if id(buffer) not in buffers:
                    new = torch.empty_like(buffer, dtype=buffer_format(buffer, dtype), device=device)
                    buffers[id(buffer)] = buffer, new
                setattr(module, name, buffers[id(buffer)][1])
