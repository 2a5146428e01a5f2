"""Defines a model as an ordered list of named layers, the values that a factory may return, and the batch fields of a layer.

A layer is a module. It is called with the previous layer's output (any object: a tensor, a tuple, a dict) and with the batch
fields that its `forward` names:

    class Embed(nn.Module):                      # the first layer: every parameter is a field
        def forward(self, tokens): ...

    class Block(nn.Module):                      # later ones: the first parameter is the previous output
        def forward(self, hidden, positions=None): ...

A layer may also be a builder, a function that makes its module. A rank calls only the builders of its own layers, so that no
rank needs the memory of the whole model:

    [("embed", make_embed), ("block", make_block, 32), ("head", make_head)]     # block.0 ... block.31
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from sley_core.errors import Diagnostic, KeyPath, PlanError, SleyError, format_cause
from sley_core.generators import derive_seed, use_program_seed

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo

InitWeights: TypeAlias = Callable[[nn.Module, str], None]
"""A function `init_weights(module, name)`, which sets the initial values of `module`, and changes nothing outside it."""

Adapt: TypeAlias = Callable[[nn.Module, str], None]
"""A function `adapt(module, name)`, which adds the adapters of `[adapters]` to `module` of the layer `name`, in place."""

Builder: TypeAlias = Callable[[], nn.Module]
"""A function that makes the module of a layer."""

Layers: TypeAlias = (
    nn.Sequential
    | Mapping[str, nn.Module | Builder]
    | Iterable[nn.Module | tuple[str, nn.Module | Builder] | tuple[str, Builder, int]]
)
"""The forms in which `Model` accepts its layers. A tuple holds a name, a module or builder, and, for a builder, a count."""

MODEL: KeyPath = ("model",)
"""The path of the `[model]` table in the plan, for errors."""


@dataclass(eq=False)
class Layer:
    """A named layer of the model. A communicator or `torch.compile` may replace `module`; `name` never changes. module: an
    empty module until the builder, if any, is called. fields: the names of the batch fields that the module receives;
    `set_fields` sets them. builder: makes the module; None if the module exists. unreadable: tensors that a forward must not
    read, keyed by the attribute of the layer that refers to them.
    """

    name: str
    module: nn.Module
    fields: tuple[str, ...] = ()
    builder: Builder | None = field(default=None, repr=False)
    unreadable: dict[str, Tensor] = field(default_factory=dict, repr=False)


class Model:
    """A model: its layers in order, and the optional initialiser, per-rank buffers and ties.

    layers: modules, (name, module) pairs, an `nn.Sequential` or a mapping; an unnamed layer is named by its index. Instead of a
    module, a pair may have a builder: (name, builder), or (name, builder, count) for the layers `name.0`, `name.1`, and so on.
    init_weights: called with every module, children before their parent, after the layers are made; its values replace earlier
    values. Layers that it initialises completely may be made on meta. per_rank_buffers: name patterns (`"*.running_mean"`) of
    buffers that training may write, and that then differ between ranks; all other buffers are constant. ties: pairs of
    parameter names, `("embed.table.weight", "head.output.weight")`; the first parameter, which must be in an earlier layer,
    replaces the second. Layers with builders can be tied only here. Raises PlanError "model-factory" if a layer is invalid.
    """

    def __init__(
        self,
        layers: Layers,
        init_weights: InitWeights | None = None,
        per_rank_buffers: Sequence[str] = (),
        ties: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.layers: tuple[Layer, ...] = tuple(_make_layers(layers))
        self.init_weights = init_weights
        self.per_rank_buffers = tuple(per_rank_buffers)
        self.ties = tuple(ties)
        self.recipe: Any = None  # a `Recipe` of a model on meta (`build.py`)
        self.adapt: Adapt | None = None  # set by the recipe
        self.base_digests: dict[str, int] = {}  # checksums of the frozen parameters that this rank has, if it has adapters
        _check_unique(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def num_parameters(self) -> tuple[int, int]:
        """Returns the number of elements of all parameters, and of all trained parameters. A tied parameter counts once."""
        parameters = {parameter for layer in self.layers for parameter in layer.module.parameters()}
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> Layer:
        """Returns the layer `name`. Raises StopIteration if there is none."""
        return next(layer for layer in self.layers if layer.name == name)

    def build(self, seed: int = 0) -> "Model":
        """Calls all builders, ties parameters, and returns this model. Raises the errors of `build_layer` and `tie`."""
        for layer in self.layers:
            self.build_layer(layer, seed)
            layer.builder = None
        self.tie()
        return self

    def initialise(self) -> None:
        """Calls `init_weights` once for each module of layers without builders. Raises PlanError "model-init" if it fails."""
        initialised_ids: set[int] = set()
        memory: dict[nn.Parameter, nn.Parameter] = {}
        for layer in self.layers:
            if layer.builder is None and self.init_weights is not None:
                _allocate_parameters(layer.module, memory)
                self._initialise(layer.module, layer.name, initialised_ids)

    def build_layer(self, layer: Layer, seed: int, *, initialises: bool = True) -> None:
        """Calls the layer's builder, if any, with generators seeded by `derive_seed(seed, layer.name)`, then `init_weights` if
        `initialises` is true. Raises PlanError "model-factory" if the builder fails, and "model-init" if `init_weights` fails.
        """
        if layer.builder is None:
            return
        with use_program_seed(derive_seed(seed, layer.name)):
            try:
                module = layer.builder()
            except SleyError:
                raise
            except Exception as error:
                raise _factory_error(f"the builder of the layer {layer.name!r} failed: {format_cause(error)}") from error
            if not isinstance(module, nn.Module):
                kind = _describe_type(module)
                raise _factory_error(
                    f"the builder of the layer {layer.name!r} must return a torch.nn.Module, but returned {kind}"
                )
            layer.module = module
            if initialises and self.init_weights is not None:
                _allocate_parameters(module, {})
                self._initialise(module, layer.name, set())

    def adapt_layer(self, layer: Layer, seed: int) -> None:
        """Adds the model's adapters, if any, to the layer, with generators seeded by `derive_seed(seed, layer.name,
        "adapters")`. Raises PlanError "model-adapters" if adding them fails.
        """
        if self.adapt is None:
            return
        with use_program_seed(derive_seed(seed, layer.name, "adapters")):
            try:
                self.adapt(layer.module, layer.name)
            except SleyError:
                raise
            except Exception as error:
                message = f"the layer {layer.name!r} cannot have adapters: {format_cause(error)}"
                raise PlanError("model-adapters", message, path=("adapters",)) from error

    def tie(self) -> None:
        """Ties the parameters in `ties`. Raises PlanError "model-factory" if a tie is invalid, or two layers are one module."""
        _check_unique(self.layers)
        for first, second in self.ties:
            (first_index, source), (second_index, target) = self._locate_parameter(first), self._locate_parameter(second)
            if first_index >= second_index:
                raise _factory_error(f"the model ties {second!r} to {first!r}, which is not in an earlier layer")
            setattr(target, second.rpartition(".")[2], getattr(source, first.rpartition(".")[2]))

    def _locate_parameter(self, name: str) -> tuple[int, nn.Module]:
        """Returns the layer index and module of the parameter `name`. Raises PlanError "model-factory" if there is none."""
        owner, _, attribute = name.rpartition(".")
        for index, layer in enumerate(self.layers):
            for path, module in layer.module.named_modules(prefix=layer.name):
                if path == owner and module._parameters.get(attribute) is not None:
                    return index, module
        raise _factory_error(f"the model ties the parameter {name!r}, which does not exist")

    @torch.no_grad()
    def _initialise(self, module: nn.Module, name: str, initialised_ids: set[int]) -> None:
        """Calls `init_weights` for the children of `module`, then for `module`, except modules in `initialised_ids`."""
        if id(module) in initialised_ids:
            return
        assert self.init_weights is not None, name
        for key, child in module.named_children():
            self._initialise(child, f"{name}.{key}", initialised_ids)
        initialised_ids.add(id(module))
        try:
            self.init_weights(module, name)
        except SleyError:
            raise
        except Exception as error:
            message = f"the module {name!r} ({type(module).__name__}) cannot be initialised: {format_cause(error)}"
            raise PlanError("model-init", message, path=MODEL) from error


def _allocate_parameters(module: nn.Module, replacements: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replaces parameters on meta with uninitialised parameters on the host. Adds old and new parameters to `replacements`."""
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in replacements:
                    # `empty_like` would import the compiler for a tensor on meta.
                    data = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    replacements[parameter] = parameter_like(parameter, data)
                submodule._parameters[name] = replacements[parameter]


def as_model(returned: Any) -> Model:
    """Returns a factory's result as a `Model`. Raises PlanError "model-factory" if it is neither a model nor layers."""
    return returned if isinstance(returned, Model) else Model(returned)


def _make_layers(layers: Any) -> Iterator[Layer]:
    """Yields a layer for each module, (name, module) pair or builder. Raises PlanError "model-factory" for other items."""
    for index, item in enumerate(_layer_items(layers)):
        name, module, *count = item if isinstance(item, tuple) and len(item) in (2, 3) else (str(index), item)
        is_builder = callable(module) and not isinstance(module, nn.Module) and isinstance(item, tuple)
        if not isinstance(module, nn.Module) and not is_builder:
            raise _factory_error(f"layer {index} of the model must be a torch.nn.Module, but is {_describe_type(module)}")
        if not isinstance(name, str) or not name:
            raise _factory_error(f"the name of layer {index} of the model must be a string, but is {_describe_type(name)}")
        if count and not (is_builder and type(count[0]) is int and count[0] > 0):
            message = (
                f"layer {index} of the model has the count {count[0]!r}, but a count must be at least 1, and only builders can "
                "have a count"
            )
            hint = "set a count of at least 1, or remove it if the layer is not a builder"
            raise PlanError("model-factory", message, path=MODEL, hint=hint)
        for layer_name in [f"{name}.{number}" for number in range(count[0])] if count else [name]:
            yield Layer(layer_name, nn.Module(), builder=module) if is_builder else Layer(layer_name, module)


def _layer_items(layers: Any) -> Iterable[Any]:
    """Returns the unchecked items of `layers`. Raises PlanError "model-factory" if `layers` is one module, or not iterable."""
    if isinstance(layers, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        # named_children would silently leave out the second occurrence of a module
        named = layers.named_modules(remove_duplicate=False)
        return [(name, module) for name, module in named if name and "." not in name]
    if isinstance(layers, Mapping):
        return layers.items()
    if isinstance(layers, nn.Module | str) or not isinstance(layers, Iterable):
        raise _factory_error(f"the model's factory must return a list of layers, but returned {_describe_type(layers)}")
    return layers


def _check_unique(layers: Sequence[Layer]) -> None:
    """Raises PlanError "model-factory" if `layers` is empty, two layers are one module, or a name occurs twice."""
    if not layers:
        raise _factory_error("the model's factory returned no layers")
    modules: dict[int, str] = {}
    for layer in layers:
        first = modules.setdefault(id(layer.module), layer.name)
        if first != layer.name:
            message = f"the layers {first!r} and {layer.name!r} are the same module"
            hint = "create two modules, which may share their parameters or submodules"
            raise PlanError("model-factory", message, path=MODEL, hint=hint)
    parameters = (name for layer in layers for name, _ in layer.module.named_parameters(layer.name, remove_duplicate=False))
    for kind, names in (("layers", (layer.name for layer in layers)), ("parameters", parameters)):
        for name, count in Counter(names).items():
            if count > 1:
                raise _factory_error(f"two {kind} of the model are named {name!r}")


def _describe_type(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _factory_error(message: str) -> PlanError:
    hint = "return modules, (name, module) pairs, an nn.Sequential, or sley_core.api.model.Model(layers, ...)"
    return PlanError("model-factory", message, path=MODEL, hint=hint)


def set_fields(model: Model, data: "DataInfo") -> Model:
    """Sets the batch fields of each layer from the signature of its `forward`, and returns the same model. A parameter without
    a default must be a field of the data. A parameter with a default receives the field if the data has it. `**kwargs` receives
    all other fields. Calls no layer. Raises one PlanError with a "model-field" diagnostic for each mismatch.
    """
    problems: list[Diagnostic] = []
    for index, layer in enumerate(model.layers):
        layer.fields = tuple(_accepted_fields(layer, index == 0, data, problems))
    if problems:
        raise PlanError.from_diagnostics(problems)
    return model


def _accepted_fields(layer: Layer, is_first: bool, data: "DataInfo", problems: list[Diagnostic]) -> Iterator[str]:
    """Yields the batch fields that the layer's `forward` accepts, and appends mismatches to `problems`. Except in the first
    layer, the first parameter is the previous layer's output, not a field.
    """
    try:
        # torch.compile's wrapper takes any arguments; the wrapped module has the signature
        module = getattr(layer.module, "_orig_mod", layer.module)
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        problems.append(_field_error(layer, "must have a Python signature", "write its forward in Python"))
        return
    if not is_first:
        if not parameters or parameters[0].kind in (parameters[0].KEYWORD_ONLY, parameters[0].VAR_KEYWORD):
            fault = "must take the output of the previous layer as its first parameter"
            problems.append(_field_error(layer, fault, "add a parameter for the previous output"))
            return
        if parameters[0].kind is not parameters[0].VAR_POSITIONAL:
            parameters = parameters[1:]
    names = {parameter.name for parameter in parameters}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from (name for name in data.fields if name not in names)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in data.fields and parameter.kind is not parameter.POSITIONAL_ONLY:
            yield parameter.name
        elif parameter.default is parameter.empty:
            advice = "every parameter of the first layer is a field" if is_first else "or give it a default"
            hint = f"the data's fields are {', '.join(data.fields)}; {advice}"
            problems.append(_field_error(layer, f"reads the field {parameter.name!r}, which the data does not have", hint))


def _field_error(layer: Layer, fault: str, hint: str) -> Diagnostic:
    message = f"layer {layer.name!r} ({type(layer.module).__name__}.forward) {fault}"
    return Diagnostic("model-field", message, path=MODEL, hint=hint)


def parameter_locations(name: str, module: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """Returns the name, module, attribute and parameter of each registration of a parameter in `module`; ties have several."""
    return [
        (f"{path}.{attribute}", owner, attribute, parameter)
        for path, owner in module.named_modules(prefix=name, remove_duplicate=False)
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]


def parameter_like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Returns a new parameter over `data` with the `requires_grad`, hooks and Python attributes of `parameter`."""
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    if parameter._backward_hooks is not None:
        new._backward_hooks = parameter._backward_hooks  # the same dict: `handle.remove()` still works
    return new


class ForwardPatch:
    """Makes `module(...)` call `forward`, from construction until `undo`. If a module has several patches, it calls the latest;
    `__wrapped__` is the previous forward. Patches can be undone in any order; after the last `undo` the module's `__dict__` is
    as before the first patch. A forward that a program assigns over a patch stays. Copies of the module are not patched.
    """

    __slots__ = ("_forward", "_previous", "module")

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        self._forward: Callable[..., Any] | None = forward
        self._previous: Callable[..., Any] | None = vars(module).get("forward")
        # `setattr` is avoided: a module may define its own, and torch's would register a forward that is itself a module.
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.__wrapped__ if self._forward is None else self._forward)(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Returns the forward below this patch. Through it, `inspect.signature` finds the signature of the original forward."""
        if self._previous is not None:
            return self._previous
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward

    def undo(self) -> None:
        """Removes the patch. While later patches are above it, it stays in place and only calls the forward below it."""
        self._forward = None
        attributes = vars(self.module)
        while isinstance(patch := attributes.get("forward"), ForwardPatch) and patch._forward is None:
            if patch._previous is None:
                del attributes["forward"]
            else:
                attributes["forward"] = patch._previous

    def __reduce__(self) -> tuple[object, ...]:
        if self._previous is None:
            return getattr, (self.module, "forward")  # by then the copy has no forward but its class's
        return _return_forward, (self._previous,)


def _return_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
