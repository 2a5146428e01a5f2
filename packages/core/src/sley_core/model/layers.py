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
"""`init_weights(module, name)` gives `module`, and nothing outside it, its first values."""

Layers: TypeAlias = "nn.Sequential | Mapping[str, nn.Module] | Iterable[nn.Module | tuple[str, nn.Module]]"

MODEL: KeyPath = ("model",)


@dataclass(frozen=True, eq=False)
class Leftover:
    """A tensor on meta that a layer holds at `where`, as neither parameter nor buffer, and what the factory wrote to it.

    ref: None for a result that autograd made of parameters: no step would make it anew.
    """

    where: str
    tensor: Tensor
    ref: Ref | None


@dataclass(eq=False)
class Layer:
    """One layer. `module` may be replaced (by a communicator's, by a compiled one); `name` never changes.

    fields: the names of the batch fields that the module is called with, once `with_fields` has looked. written: by id of
    its parameters on meta, what the factory gave them, until they are materialised. held: what it holds besides.
    """

    name: str
    module: nn.Module
    fields: tuple[str, ...] = ()
    written: dict[int, Ref] = field(default_factory=dict, repr=False)
    held: list[Leftover] = field(default_factory=list, repr=False)


class Model:
    """The layers of a model in order, and what else a factory may say about it.

    layers: modules, or (name, module) pairs, or an `nn.Sequential` or mapping; unnamed ones are named by their place.
    init_weights: called with every module, after which its first values count; without it what the factory wrote does, and
        a module's own `reset_parameters` where it wrote nothing.
    per_rank_buffers: patterns (`"*.running_mean"`) of buffers that training may write, which then differ from rank to
        rank. All other buffers must stay as they were built.
    Raises PlanError "model-factory".
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
        """The elements of all parameters, of those that are trained; one that several modules share counts once."""
        every = {parameter for layer in self.layers for parameter in layer.module.parameters()}
        return sum(each.numel() for each in every), sum(each.numel() for each in every if each.requires_grad)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> Layer:
        """The layer called `name`."""
        return next(layer for layer in self.layers if layer.name == name)


def as_model(returned: Any) -> Model:
    """What a factory returned, as a `Model`; PlanError "model-factory" says what is wrong with it."""
    return returned if isinstance(returned, Model) else Model(returned)


def _named(layers: Any) -> Iterator[Layer]:
    for at, item in enumerate(_items(layers)):
        name, module = item if isinstance(item, tuple) and len(item) == 2 else (str(at), item)
        if not isinstance(module, nn.Module):
            raise _unusable(f"layer {at} of the model is {_described(module)}, not a torch.nn.Module")
        if not isinstance(name, str) or not name:
            raise _unusable(f"the name of layer {at} of the model is {_described(name)}, not a string")
        yield Layer(name, module)


def _items(layers: Any) -> Iterable[Any]:
    if isinstance(layers, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        # named_children would leave out the second of two equal modules without a word
        named = layers.named_modules(remove_duplicate=False)
        return [(name, module) for name, module in named if name and "." not in name]
    if isinstance(layers, Mapping):
        return layers.items()
    if isinstance(layers, nn.Module | str) or not isinstance(layers, Iterable):
        raise _unusable(f"the model's factory returned {_described(layers)}, not a list of layers")
    return layers


def _check_unique(layers: Sequence[Layer]) -> None:
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
    return PlanError(
        "model-factory",
        message,
        path=MODEL,
        hint="return modules, (name, module) pairs, an nn.Sequential, or sley_core.model.layers.Model(layers, ...)",
    )


def with_fields(model: Model, data: DataInfo) -> Model:
    """The same model, each layer knowing the fields it is called with; nothing is called yet.

    A parameter without a default must be a field of the data; one with a default is passed if the data has it;
    `**kwargs` takes every field. All misfits are in one PlanError "model-field".
    """
    problems: list[Diagnostic] = []
    for at, layer in enumerate(model.layers):
        layer.fields = tuple(_fields(layer, at == 0, data, problems))
    if problems:
        raise PlanError.many(problems)
    return model


def _fields(layer: Layer, is_first: bool, data: DataInfo, problems: list[Diagnostic]) -> Iterator[str]:
    try:
        # what torch.compile wraps takes anything, and hands it on
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
    """A new parameter over `data`, with the old one's `requires_grad`, its hooks, and whatever a user hung on it."""
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    if parameter._backward_hooks:
        new._backward_hooks = parameter._backward_hooks  # the same dict: who holds a handle may still take a hook away
    return new
