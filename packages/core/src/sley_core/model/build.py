"""Builds the model of a plan twice: on meta, and on the host with the values that plain PyTorch would give it.

The first run of the factory (`build_on_meta`) gives the names, shapes and ties of parameters, but no memory. A torch hook moves
each parameter to the meta device when a module registers it. Tied parameters stay one object. Buffers and everything else are
computed as usual. (Within `torch.device("meta")` common code such as `torch.linspace(0, rate, depth).tolist()` would fail.) If
the factory needs the values of parameters, this run is on the host, too.

The second run (`HostModel`) is on the host, with the generators in the state after `torch.manual_seed(seed)`. Then the model's
`init_weights(module, name)` is called for every module. In this rank's layers, the resulting modules replace the meta modules,
after their parameters are sharded, cast and moved to the device. Layers with builders are built one at a time, to save memory.
torch fills new memory with NaN. A parameter with NaN values afterwards raises an error, because nothing has written them.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from sley_core.errors import PlanError, PluginError, SleyError, format_cause, shorten_names
from sley_core.generators import find_function_generators, use_program_seed
from sley_core.model.layers import MODEL, Layer, Model, as_model, parameter_like, parameter_locations, set_fields
from sley_core.model.tensors import check_references, checksum, matches_any, select_buffer_dtype, select_parameter_dtype

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.plan.plan import Component


@dataclass(frozen=True)
class Recipe:
    """The inputs of a plan's model factory, for further calls. component: the factory. data: the argument of the factory.
    seed: the seed of the generators during a call. adapters: the adapters of the plan, or None. meta_error: the message of the
    error that the factory raised on the meta device, or "" if it succeeded there.
    """

    component: "Component"
    data: "DataInfo"
    seed: int
    adapters: "Component | None" = None
    meta_error: str = ""

    def call_factory(self) -> Model:
        """Calls the factory, but no builders, and returns its model, with `adapt` set if the plan has adapters. Raises
        PluginError "plugin-failed" if the factory fails, and PlanError "model-factory" if it does not return layers.
        """
        try:
            model = as_model(self.component.build(self.data))
        except SleyError:
            raise
        except Exception as error:
            message = f"`{self.component.name}` failed to build its layers: {format_cause(error)}"
            raise PluginError("plugin-failed", message, path=MODEL) from error
        if self.adapters is not None:
            model.adapt = self.adapters.build([layer.name for layer in model.layers])
        return model


def build_on_meta(component: "Component", data: "DataInfo", seed: int, adapters: "Component | None" = None) -> Model:
    """Returns the model of a plan with parameters on meta, and sets the fields of its layers. Does not communicate. The
    structure may depend on draws from `random` and numpy, seeded by `seed`, but not on draws from torch. Restores all
    generators. Raises PluginError "plugin-failed" if a plugin's code fails, and PlanError if the model is invalid.
    """
    recipe = Recipe(component, data, seed, adapters)
    try:
        model = _run_factory(recipe, to_meta := MetaParameters(), on_meta=True)
    except Exception as error:  # it probably reads values; any other error is raised again
        model = _run_factory(recipe, to_meta := MetaParameters(), on_meta=False)
        recipe = Recipe(component, data, seed, adapters, format_cause(error.__cause__ or error))
    check_references({layer.name: layer.module for layer in model.layers}, to_meta.replacement)
    model.recipe = recipe
    return set_fields(model, data)


def _run_factory(recipe: Recipe, to_meta: "MetaParameters", *, on_meta: bool) -> Model:
    """Runs the factory and its builders, and returns the model with all parameters on meta. on_meta: whether a parameter moves
    to meta when a module registers it; if False, it moves after its layer is built.
    """
    context = _parameters_on_meta(to_meta) if on_meta else nullcontext()
    with use_program_seed(recipe.seed), _preserve_defaults(), context:
        model = recipe.call_factory()
        for layer in model.layers:
            model.build_layer(layer, recipe.seed, initialises=False)
            _move_to_meta(layer, to_meta)
        _check_builders(model)
        model.tie()
        if model.adapt is not None:
            for layer in model.layers:
                layer.module.requires_grad_(False)
            for layer in model.layers:
                model.adapt_layer(layer, recipe.seed)
                _move_to_meta(layer, to_meta)
            if not model.num_parameters()[1]:
                message = "the adapters have no parameters, so there is nothing to train"
                raise PlanError("model-adapters", message, path=("adapters",), hint="use names that `train-cli show` prints")
    return model


def _move_to_meta(layer: Layer, to_meta: "MetaParameters") -> None:
    """Moves the layer's parameters to meta. Raises the errors of `_check_parameters`."""
    _check_parameters(layer.name, layer.module, to_meta)
    for module in layer.module.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = to_meta(parameter)


@contextmanager
def _preserve_defaults() -> Iterator[None]:
    """Restores torch's default dtype and device after the block, for the factory's next run."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


def _check_builders(model: Model) -> None:
    """Raises PlanError if the result of a builder would depend on which other builders a rank has called: "model-factory" if
    the module shares a parameter with another layer, "model-random" if a builder uses a generator that was made outside it.
    """
    holders: dict[nn.Parameter, tuple[Layer, str]] = {}
    for layer in model.layers:
        if layer.builder and (generators := find_function_generators(layer.builder)):
            type_name = type(generators[0]).__name__
            message = f"the builder of the layer {layer.name!r} uses a {type_name} that was created outside the builder"
            hint = "use torch's default generator, `random` or numpy, or create the generator in the builder"
            raise PlanError("model-random", message, path=MODEL, hint=hint)
        for name, parameter in layer.module.named_parameters(layer.name):
            first_layer, first_name = holders.setdefault(parameter, (layer, name))
            if first_layer is not layer and (layer.builder or first_layer.builder):
                message = f"{name!r} and {first_name!r} are the same parameter, created outside the builders of their layers"
                hint = f"create the parameter in each builder, and return Model(layers, ties=[({first_name!r}, {name!r})])"
                raise PlanError("model-factory", message, path=MODEL, hint=hint)


_origins = WeakIdKeyDictionary()
"""Maps each parameter on meta to the `MetaParameters` that made it. A model must not use parameters of an earlier build."""


class MetaParameters:
    """Maps each real parameter to the parameter on meta that replaces it in all modules, so that ties are preserved."""

    def __init__(self) -> None:
        self._replacements = WeakIdKeyDictionary()

    def replacement(self, tensor: Tensor) -> Tensor | None:
        """Returns the parameter on meta that replaces `tensor` in modules, or None."""
        return cast(Tensor | None, self._replacements.get(tensor))  # type: ignore[no-untyped-call]

    def __call__(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the parameter on meta that replaces `parameter`. Creates it in the first call."""
        if parameter not in self._replacements:
            if parameter._backward_hooks is None:
                parameter._backward_hooks = OrderedDict()  # the same dict, for hooks that the real one gets later
            self._replacements[parameter] = parameter_like(parameter, parameter.data.to("meta"))
            _origins[self._replacements[parameter]] = self
        return cast(nn.Parameter, self._replacements[parameter])


class NoDrawsOnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that skips in-place draws on meta, such as `normal_`. Such draws would be slow, and load torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, since no compiled code runs in this mode. If it returned True, torch would import its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if is_draw and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_on_meta(to_meta: MetaParameters) -> Iterator[None]:
    """Within the block, registers the parameter `to_meta(parameter)` if this thread registers `parameter` in a module. torch's
    hook for registrations is global, so registrations in other threads are ignored.
    """
    thread_id = threading.get_ident()

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Returns the meta parameter to register instead of `parameter`, or None to keep `parameter`."""
        if threading.get_ident() != thread_id or parameter is None or is_lazy(parameter) or parameter.is_meta:
            return None
        return None if is_traceable_wrapper_subclass(parameter) else to_meta(parameter)

    handle = register_module_parameter_registration_hook(cast(Any, register))  # torch's type of a hook has no result
    try:
        with warnings.catch_warnings(), NoDrawsOnMeta():  # type: ignore[no-untyped-call]
            # `load_state_dict` gives this warning; the second run loads the values
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter in the checkpoint to a meta")
            yield
    finally:
        handle.remove()


def _check_parameters(name: str, module: nn.Module, build: MetaParameters | None = None) -> None:
    """Raises PlanError if `module`, the layer `name`, has an unsupported parameter: "model-init" if it is lazy, integer,
    sparse, of a tensor subclass or of an earlier build than `build`; "model-hook" if its accumulated gradient has a hook.
    """
    for path, parameter in module.named_parameters(name):
        kind, code = type(parameter).__name__, "model-init"
        if is_lazy(parameter):
            reason, hint = ("has no shape yet", "pass the input size to the module, or call it once in the factory")
        elif not parameter.is_floating_point():
            reason, hint = f"is {parameter.dtype}, but parameters must be floating-point", "register it as a buffer"
        elif is_traceable_wrapper_subclass(parameter) or parameter.layout is not torch.strided:
            reason, hint = f"is a {kind}, but must be a plain dense tensor", "use a plain tensor in the module"
        elif parameter in _origins and _origins[parameter] is not build:
            reason = "belongs to a model that an earlier call built"
            hint = "create new modules in each call, since a factory and a builder are called more than once"
        elif parameter._post_accumulate_grad_hooks:
            code, reason = "model-hook", "has a hook on its accumulated gradient, which only the run may use"
            hint = "use `register_hook`, or write a gradient handler (docs/write-a-plugin.md)"
        else:
            continue
        raise PlanError(code, f"the parameter {path!r} {reason}", path=MODEL, hint=hint)


class HostModel:
    """A second build of a model, on the host, from which `load_values` takes parameters with values. model: the result of
    `build_on_meta`. The constructor calls the factory and initialises the layers without builders. Raises PlanError
    "model-init" if a parameter shares memory but is not tied, "model-differs" if the builds differ, or the factory's errors.
    """

    def __init__(self, model: Model) -> None:
        recipe: Recipe = model.recipe
        self.model = model
        self._seed = recipe.seed
        with _emulate_plain_pytorch(self._seed):
            self._factory_model = recipe.call_factory()
            self._factory_model.initialise()
            for layer in self._factory_model.layers:
                if layer.builder is None:
                    self._factory_model.adapt_layer(layer, self._seed)
        meta_layers, host_layers = (
            ", ".join(f"{layer.name} (a builder)" if layer.builder else layer.name for layer in built.layers)
            for built in (model, self._factory_model)
        )
        if meta_layers != host_layers:
            raise _differs_error(f"first the layers {meta_layers}, then {host_layers}")
        self._check_modules({layer.name: layer.module for layer in self._factory_model.layers if layer.builder is None})
        # The first location of each parameter on meta, by id. A reference to the parameter keeps its id from being reused.
        self._first_locations: dict[int, tuple[Layer, str, nn.Parameter]] = {}
        for layer in model.layers:
            for name, _, _, parameter in parameter_locations(layer.name, layer.module):
                self._first_locations.setdefault(id(parameter), (layer, name, parameter))

    def factory_module(self, layer: Layer) -> nn.Module:
        """Returns the module that the factory made on the host for `layer`; an empty module if the layer has a builder."""
        return self._factory_model[layer.name].module

    def build_module(self, layer: Layer) -> nn.Module:
        """Returns the module of `layer` with values on the host. Calls the layer's builder each time, if it has one."""
        host_layer = self._factory_model[layer.name]
        if host_layer.builder is None:
            return host_layer.module
        with _emulate_plain_pytorch(self._seed):
            self._factory_model.build_layer(host_layer, self._seed)
            self._factory_model.adapt_layer(host_layer, self._seed)
        module, host_layer.module = host_layer.module, nn.Module()
        self._check_modules({layer.name: module})
        return module

    @torch.no_grad()
    def load_values(
        self,
        layer_names: Collection[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
        keep: Sequence[str] = (),
    ) -> dict[int, nn.Parameter]:
        """Replaces the modules of the layers `layer_names` with modules that have values on `device`. Returns the new
        parameters by the id of the parameter on meta that each replaces. dtype: the dtype of parameters; parameters whose names
        match the patterns `keep` have at least fp32. shard: by the id of a sharded parameter on meta, a function from its full
        value on the host to this rank's shard. Training modes and `requires_grad` do not change. Does not communicate. Raises
        PlanError "model-init" if a parameter has no value, and "model-buffer" if a buffer has none.
        """
        parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in self.model.layers:
            if layer.name not in layer_names:
                continue
            meta_locations, module = parameter_locations(layer.name, layer.module), self.build_module(layer)
            host_locations = parameter_locations(layer.name, module)
            for (name, _, _, meta), (_, owner, attribute, real) in zip(meta_locations, host_locations, strict=True):
                if id(meta) not in parameters:
                    value = self._initial_value(layer, name, meta, real)
                    if self.model.adapt is not None and not meta.requires_grad:
                        self.model.base_digests[self._first_locations[id(meta)][1]] = checksum(value)
                    if is_sharded := shard is not None and id(meta) in shard:
                        value = shard[id(meta)](value)
                    # The value is copied, since the factory's memory may belong to numpy, a file or a larger tensor.
                    value = value.to(device=device, dtype=select_parameter_dtype(name, dtype, keep), copy=not is_sharded)
                    parameters[id(meta)] = parameter_like(real, value)
                    parameters[id(meta)].requires_grad_(meta.requires_grad)
                setattr(owner, attribute, parameters[id(meta)])
            _move_buffers(layer.name, module, dtype, device, buffers)
            module.train()  # a module may override it
            for old, new in zip(layer.module.modules(), module.modules(), strict=True):
                new.training = old.training
            layer.module = module
        return parameters

    def drop_other_layers(self, parameters: Mapping[int, nn.Parameter], layer_names: Collection[str]) -> None:
        """Drops the values of all layers except `layer_names`, but keeps `parameters`, returned by the last `load_values`."""
        for layer in self.model.layers:
            if layer.name not in layer_names:
                on_meta = [meta for _, _, _, meta in parameter_locations(layer.name, layer.module)]
                for module in (layer.module, self.factory_module(layer)):  # other layers may refer to the factory's module
                    for meta, (_, owner, attribute, _) in zip(on_meta, parameter_locations(layer.name, module), strict=False):
                        setattr(owner, attribute, parameters.get(id(meta), meta))
                layer.unreadable = {}

    def _initial_value(self, layer: Layer, name: str, meta: nn.Parameter, real: nn.Parameter) -> Tensor:
        """Returns the value of a parameter on the host, from its first location, which may be in another layer. Raises
        PlanError "model-init" if the parameter has no value.
        """
        first_layer, first_name, _ = self._first_locations[id(meta)]
        if first_layer is not layer:
            locations = parameter_locations(first_layer.name, self.build_module(first_layer))
            real = next(parameter for path, _, _, parameter in locations if path == first_name)
        value = real.detach()
        if not value.is_meta and not value.isnan().any():
            return value
        message = f"the parameter {name!r} has no initial value, or an initial value that is not a number (NaN)"
        hint = "write to it in the factory, or return sley_core.api.model.Model(layers, init_weights)"
        raise PlanError("model-init", message, path=MODEL, hint=hint)

    def _check_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Checks `modules`, a mapping from layer names to modules. For each of these layers in the model, records the tensors
        that its forward must not read.
        """
        _check_structure(self.model, modules)
        for name, module in modules.items():
            _check_parameters(name, module)
        unregistered = check_references(modules)
        for name in modules:
            self.model[name].unreadable = {entry.attribute: entry.tensor for entry in unregistered.get(name, ())}


@contextmanager
def _emulate_plain_pytorch(seed: int) -> Iterator[None]:
    """Seeds the generators for the block as `torch.manual_seed(seed)` does, and makes torch fill new memory with NaN."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch.use_deterministic_algorithms would import the compiler.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        with use_program_seed(seed), NoDrawsOnMeta():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch._C._set_deterministic_algorithms(is_deterministic, warn_only=warns_only)


def _check_structure(model: Model, modules: Mapping[str, nn.Module]) -> None:
    """Raises PlanError "model-differs" if the structure of `modules`, a mapping from layer names, differs from the structure
    of `model` on meta: modules, parameters, buffers, shapes and ties; or if a parameter is frozen only in `modules`.
    """
    layers = [layer for layer in model.layers if layer.name in modules]
    declared_ties = {second for _, second in model.ties}
    first = dict(_describe_structure([(layer.name, layer.module) for layer in layers], declared_ties))
    second = dict(_describe_structure([(layer.name, modules[layer.name]) for layer in layers], declared_ties))
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            raise _differs_error(f"{name!r} is first {first.get(name, 'missing')}, then {second.get(name, 'missing')}")
    for layer in layers if model.adapt is None else ():
        locations = (parameter_locations(layer.name, module) for module in (layer.module, modules[layer.name]))
        for (name, _, _, meta), (_, _, _, real) in zip(*locations, strict=True):
            if name not in declared_ties and meta.requires_grad and not real.requires_grad:
                message = (
                    f"the parameter {name!r} is trainable at first, but is later frozen under another name or by `init_weights`"
                )
                hint = "freeze it in the factory through its module: `module.weight.requires_grad_(False)`"
                raise PlanError("model-differs", message, path=MODEL, hint=hint)


def _describe_structure(modules: Iterable[tuple[str, nn.Module]], declared_ties: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and a description of each submodule, buffer and parameter. Omits the ties of names in `declared_ties`."""
    first_names: dict[nn.Parameter, str] = {}
    for layer_name, module in modules:
        for path, submodule in module.named_modules(prefix=layer_name, remove_duplicate=False):
            yield path, f"a {type(submodule).__name__}"
            for attribute, buffer in submodule._buffers.items():
                if buffer is not None:
                    yield f"{path}.{attribute}", f"a buffer {list(buffer.shape)}"
            for attribute, parameter in submodule._parameters.items():
                if parameter is not None:
                    name = f"{path}.{attribute}"
                    first_name = name if name in declared_ties else first_names.setdefault(parameter, name)
                    tie = f" tied to {first_name!r}" if first_name != name else ""
                    yield name, f"a parameter {list(parameter.shape)}{tie}"


def _differs_error(difference: str) -> PlanError:
    message = f"two calls of the factory returned different models: {difference}"
    hint = "make the factory depend only on its options and the data; it is called once without values and once with values"
    return PlanError("model-differs", message, path=MODEL, hint=hint)


def _move_buffers(
    name: str, layer: nn.Module, dtype: torch.dtype, device: torch.device, moved: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Moves the layer's buffers to `device`. moved: the old and new buffer, by the old buffer's id. This function adds to
    `moved`, so that shared buffers stay shared. Raises PlanError "model-buffer" if a buffer is on meta.
    """
    for path, module in layer.named_modules(prefix=name):
        for attribute, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                message = f"the buffer '{path}.{attribute}' was built without values"
                raise PlanError("model-buffer", message, path=MODEL, hint="write to it in the factory")
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer, buffer.to(device=device, dtype=select_buffer_dtype(buffer, dtype))
            setattr(module, attribute, moved[id(buffer)][1])


def check_written_buffers(buffers: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises PlanError "model-buffer-written" unless `buffers` is empty. buffers: the name and module of each buffer that
    training has written. A running mean, for example, would be the mean of only this rank's samples, since it is not reduced.
    """
    if not buffers:
        return
    types = " and ".join(dict.fromkeys(type(module).__name__ for _, module in buffers))
    names = shorten_names([f"`{name}`" for name, _ in buffers], 3)
    count = "a buffer" if len(buffers) == 1 else f"{len(buffers)} buffers"
    patterns = ", ".join(dict.fromkeys(f'"*.{name.rpartition(".")[2]}"' for name, _ in buffers))
    alternative = ", or use GroupNorm" if any(isinstance(module, _NormBase) for _, module in buffers) else ""
    raise PlanError(
        "model-buffer-written",
        f"training updates {count} of {types} ({names}), whose values would differ between ranks",
        path=MODEL,
        hint="to keep separate values per replica, return `sley_core.api.model.Model(layers, "
        f"per_rank_buffers=({patterns},))` from the factory{alternative}",
    )


def set_train_mode(model: Model) -> None:
    """Puts the layers of `model` into training mode, except two kinds of modules that the factory left in evaluation mode:
    frozen modules within a module in training mode, and each BatchNorm whose statistics may not be written, since ranks do not
    share them. Calls torch's `train()`, which a module may override, because `from_pretrained` returns a model in evaluation
    mode, without dropout. Afterwards, a program may call `eval()` on modules of a run.
    """
    is_training = any(layer.module.training for layer in model.layers)
    for layer in model.layers:
        modules = list(_modules_in_evaluation(layer.module, layer.name, model.per_rank_buffers, is_training))
        modes = [(part, part.training) for module in modules for part in module.modules()]
        layer.module.train()
        for part, mode in modes:
            part.training = mode


def evaluation_notes(layers: Sequence[Layer]) -> list[str]:
    """Returns a list with one note for the user, which names the outermost modules in evaluation mode, or []."""
    modules = [pair for layer in layers for pair in layer.module.named_modules(prefix=layer.name)]
    names = {name: None for name, module in modules if not module.training}
    outermost = [name for name in names if name.rpartition(".")[0] not in names]
    message = f"the factory left these modules in evaluation mode, and they stay in it: {shorten_names(outermost, 3)}"
    return [message] if outermost else []


def _modules_in_evaluation(module: nn.Module, name: str, per_rank: Sequence[str], is_training: bool) -> Iterator[nn.Module]:
    """Yields `module`, or its outermost submodules, if they stay in evaluation mode. is_training: whether the parent is in
    training mode. per_rank: name patterns of buffers that may differ between ranks.
    """
    is_norm = isinstance(module, _NormBase) and not matches_any(f"{name}.running_mean", per_rank)
    flags = [parameter.requires_grad for parameter in module.parameters()]
    is_frozen = bool(flags) and not any(flags)
    if not module.training and (is_norm or (is_training and is_frozen)):
        yield module
        return
    for key, child in module.named_children():
        yield from _modules_in_evaluation(child, f"{name}.{key}", per_rank, module.training)
