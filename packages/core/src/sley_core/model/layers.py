"""A model is an ordered list of named layers; here is what a factory may return and which batch fields a layer gets.

A layer is a module. It is called with the previous layer's output (any object: a tensor, a tuple, a dict) and with
those batch fields that its `forward` names:

    class Embed(nn.Module):                      # the first layer: every parameter is a field
        def forward(self, tokens): ...

    class Block(nn.Module):                      # later ones: the first parameter is the previous output
        def forward(self, hidden, positions=None): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from sley_core.errors import Diagnostic, KeyPath, PlanError

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.model.steps import Ref

InitWeights: TypeAlias = Callable[[nn.Module, str], None]
"""`init_weights(module, name)` sets the first values of `module`, and of nothing outside it."""

Layers: TypeAlias = "nn.Sequential | Mapping[str, nn.Module] | Iterable[nn.Module | tuple[str, nn.Module]]"

MODEL: KeyPath = ("model",)


@dataclass(frozen=True, eq=False)
class Leftover:
    """Names a tensor on meta that a layer holds at `where` other than as a parameter or buffer, for instance as a plain
    attribute.

    ref: what the factory wrote to it; None for a tensor with a `grad_fn`, computed from parameters, which a replay cannot make
    again.
    """

    where: str
    tensor: Tensor
    ref: Ref | None


@dataclass(eq=False)
class Layer:
    """Holds one named layer of the model. A communicator or `torch.compile` may replace `module`; `name` never changes.

    fields: the batch fields with which the module is called, set by `with_fields`. written: until the parameters are
    materialized, what the factory wrote to them, by id of the meta parameter. held: other tensors on meta that the layer holds.
    """

    name: str
    module: nn.Module
    fields: tuple[str, ...] = ()
    written: dict[int, Ref] = field(default_factory=dict, repr=False)
    held: list[Leftover] = field(default_factory=list, repr=False)


class Model:
    """Holds the layers of a model in order, with the initialiser and the buffer rules that a factory may add.

    layers: modules, (name, module) pairs, an `nn.Sequential` or a mapping; an unnamed layer is named by its index.
    init_weights: called with every module; its values win. Without it a parameter keeps what the factory wrote, and a module's
    own `reset_parameters` fills the parameters to which the factory wrote nothing. per_rank_buffers: patterns
    (`"*.running_mean"`) of buffers that training may write, which then differ from rank to rank. All other buffers must stay as
    they were built. Raises PlanError "model-factory".
    """

    def __init__(
        self, layers: Layers, init_weights: InitWeights | None = None, per_rank_buffers: Sequence[str] = ()
    ) -> None:
        self.layers: tuple[Layer, ...] = tuple(_named(layers))
        self.init_weights = init_weights
        self.per_rank_buffers = tuple(per_rank_buffers)
        self.built: list[nn.Parameter] = []  # all parameters on meta that its factory made, registered or not
        _check_unique(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def num_parameters(self) -> tuple[int, int]:
        """Returns the elements of all parameters and those of the trained ones; a tied parameter counts once."""
        every = {parameter for layer in self.layers for parameter in layer.module.parameters()}
        return sum(each.numel() for each in every), sum(each.numel() for each in every if each.requires_grad)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> Layer:
        """Returns the layer called `name`; raises StopIteration if there is none."""
        return next(layer for layer in self.layers if layer.name == name)


def as_model(returned: Any) -> Model:
    """Returns what a factory returned as a `Model`; raises PlanError "model-factory" if it is not a list of layers."""
    return returned if isinstance(returned, Model) else Model(returned)


def _named(layers: Any) -> Iterator[Layer]:
    """Yields one `Layer` for each module or (name, module) pair; raises PlanError "model-factory" for anything else."""
    for at, item in enumerate(_items(layers)):
        name, module = item if isinstance(item, tuple) and len(item) == 2 else (str(at), item)
        if not isinstance(module, nn.Module):
            raise _unusable(f"layer {at} of the model is {_described(module)}, not a torch.nn.Module")
        if not isinstance(name, str) or not name:
            raise _unusable(f"the name of layer {at} of the model is {_described(name)}, not a string")
        yield Layer(name, module)


def _items(layers: Any) -> Iterable[Any]:
    """Returns the modules or (name, module) pairs of any container that a factory may return."""
    if isinstance(layers, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        # named_children would silently leave out the second occurrence of a module
        named = layers.named_modules(remove_duplicate=False)
        return [(name, module) for name, module in named if name and "." not in name]
    if isinstance(layers, Mapping):
        return layers.items()
    if isinstance(layers, nn.Module | str) or not isinstance(layers, Iterable):
        raise _unusable(f"the model's factory returned {_described(layers)}, not a list of layers")
    return layers


def _check_unique(layers: Sequence[Layer]) -> None:
    """Raises PlanError "model-factory" if there are no layers, if one module is two layers, or if a layer or parameter name is
    repeated.
    """
    if not layers:
        raise _unusable("the model's factory returned no layers")
    modules: dict[int, str] = {}
    parameters: set[str] = set()
    for layer in layers:
        first = modules.setdefault(id(layer.module), layer.name)
        if first != layer.name:
            raise PlanError(
                "model-factory",
                f"the layers {first!r} and {layer.name!r} are one and the same module",
                path=MODEL,
                hint="make two modules; they may share their parameters or submodules",
            )
    names = [layer.name for layer in layers]
    for name in names:
        if names.count(name) > 1:
            raise _unusable(f"two layers of the model are named {name!r}")
    for layer in layers:
        for parameter, _ in layer.module.named_parameters(layer.name, remove_duplicate=False):
            if parameter in parameters:
                raise _unusable(f"two parameters of the model are named {parameter!r}")
            parameters.add(parameter)


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _unusable(message: str) -> PlanError:
    """Returns the PlanError "model-factory" for a return value that is not a list of layers."""
    return PlanError(
        "model-factory",
        message,
        path=MODEL,
        hint="return modules, (name, module) pairs, an nn.Sequential, or sley_core.model.layers.Model(layers, ...)",
    )


def with_fields(model: Model, data: DataInfo) -> Model:
    """Sets the batch fields with which each layer is called, from the signature of its `forward`; returns the same model.

    A parameter without a default must be a field of the data; one with a default is passed if the data has that field;
    `**kwargs` takes every field. No layer is called. Raises one PlanError with a "model-field" diagnostic for each mismatch.
    """
    problems: list[Diagnostic] = []
    for at, layer in enumerate(model.layers):
        layer.fields = tuple(_fields(layer, at == 0, data, problems))
    if problems:
        raise PlanError.many(problems)
    return model


def _fields(layer: Layer, is_first: bool, data: DataInfo, problems: list[Diagnostic]) -> Iterator[str]:
    """Yields the names of the batch fields that `layer.forward` takes; appends to `problems` what does not fit.

    The first parameter of every layer but the first is the previous layer's output, not a field.
    """
    try:
        # torch.compile's wrapper takes any arguments; the wrapped module has the signature
        module = getattr(layer.module, "_orig_mod", layer.module)
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        problems.append(_misfit(layer, "has no signature that Python can read", "write its forward in Python"))
        return
    if not is_first:
        if not parameters or parameters[0].kind in (parameters[0].KEYWORD_ONLY, parameters[0].VAR_KEYWORD):
            problems.append(_misfit(layer, "takes no previous output", "its first parameter is the previous output"))
            return
        if parameters[0].kind is not parameters[0].VAR_POSITIONAL:
            parameters = parameters[1:]
    named = {parameter.name for parameter in parameters}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from (name for name in data.fields if name not in named)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in data.fields and parameter.kind is not parameter.POSITIONAL_ONLY:
            yield parameter.name
        elif parameter.default is parameter.empty:
            known = ", ".join(data.fields)
            problems.append(
                _misfit(
                    layer,
                    f"needs {parameter.name!r}, which the data does not have",
                    f"the data's fields are {known}; "
                    + ("every parameter of the first layer is a field" if is_first else "or give it a default"),
                )
            )


def _misfit(layer: Layer, what: str, hint: str) -> Diagnostic:
    message = f"layer {layer.name!r} ({type(layer.module).__name__}.forward) {what}"
    return Diagnostic("model-field", message, path=MODEL, hint=hint)


def like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Returns a new parameter over `data` with the `requires_grad`, hooks and Python attributes of `parameter`."""
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    if parameter._backward_hooks:
        new._backward_hooks = parameter._backward_hooks  # the same dict: `handle.remove()` still works
    return new
