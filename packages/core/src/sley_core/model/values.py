"""Initialises the layers of a rank with the values that plain PyTorch would give them, which are the same in every layout.

The model's factory runs again on the host, with the generators in the state after `torch.manual_seed(seed)`. Then the model's
`init_weights(module, name)` is called for every module. In this rank's layers, the resulting modules replace those on meta,
after their parameters are sharded, cast and moved to the device. Layers with builders are built one at a time, to save memory.
torch fills new memory with NaN. A parameter with NaN values afterwards raises an error, because nothing has written them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.generators import use_program_seed
from sley_core.model.build import NoDrawsOnMeta, Recipe, check_parameters
from sley_core.model.layers import MODEL, Layer, Model, parameter_like
from sley_core.model.tensors import check_references, checksum, select_buffer_dtype, select_parameter_dtype


class HostModel:
    """A model with values on the host. Layers without builders are initialised by the constructor, layers with builders on
    request.

    model: the result of `build_on_meta`. Raises PlanError "model-init" if a parameter shares memory without being tied,
    "model-differs" if the factory's model differs from the one on meta, or the factory's own errors.
    """

    def __init__(self, model: Model) -> None:
        recipe: Recipe = model.recipe
        self.model = model
        self._seed = recipe.seed
        with _plain_pytorch(self._seed):
            self._factory_model = recipe.call()
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
        self._homes: dict[int, tuple[Layer, str, nn.Parameter]] = {}
        for layer in model.layers:
            for name, _, _, parameter in _parameter_locations(layer.name, layer.module):
                self._homes.setdefault(id(parameter), (layer, name, parameter))

    def factory_module(self, layer: Layer) -> nn.Module:
        """Returns the factory's module of `layer` on the host; an empty module if the layer has a builder."""
        return self._factory_model[layer.name].module

    def build_module(self, layer: Layer) -> nn.Module:
        """Returns the module of `layer` with values on the host. Calls the layer's builder, if it has one."""
        host_layer = self._factory_model[layer.name]
        if host_layer.builder is None:
            return host_layer.module
        with _plain_pytorch(self._seed):
            self._factory_model.build_layer(host_layer, self._seed)
            self._factory_model.adapt_layer(host_layer, self._seed)
        module, host_layer.module = host_layer.module, nn.Module()
        self._check_modules({layer.name: module})
        return module

    @torch.no_grad()
    def load_values(
        self,
        owned: Collection[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
        keep: Sequence[str] = (),
    ) -> dict[int, nn.Parameter]:
        """Puts modules with values into the layers named in `owned`, and returns the new parameters by the id of those on meta.

        dtype: the dtype of parameters, except those that match the patterns `keep`, which are fp32. shard: for each sharded
        parameter, by the id of the parameter on meta, a function from the full value on the host to this rank's shard. Training
        modes and `requires_grad` do not change. Does not communicate. Raises PlanError "model-init" for a parameter and
        "model-buffer" for a buffer without values.
        """
        parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in self.model.layers:
            if layer.name not in owned:
                continue
            meta_locations, module = _parameter_locations(layer.name, layer.module), self.build_module(layer)
            host_locations = _parameter_locations(layer.name, module)
            for (name, _, _, meta), (_, owner, attribute, real) in zip(meta_locations, host_locations, strict=True):
                if id(meta) not in parameters:
                    value = self._initial_value(layer, name, meta, real)
                    if self.model.adapt is not None and not meta.requires_grad:
                        self.model.base_digests[self._homes[id(meta)][1]] = checksum(value)
                    if is_sharded := shard is not None and id(meta) in shard:
                        value = shard[id(meta)](value)
                    # A copy, since the factory's memory may belong to numpy, a file or a larger tensor.
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

    def drop_unowned(self, parameters: Mapping[int, nn.Parameter], owned: Collection[str]) -> None:
        """Drops the values of all layers except `owned`; keeps `parameters`, a result of `load_values`. No load may follow."""
        for layer in self.model.layers:
            if layer.name not in owned:
                metas = [meta for _, _, _, meta in _parameter_locations(layer.name, layer.module)]
                for module in (layer.module, self.factory_module(layer)):  # other layers may refer to the factory's module
                    for meta, (_, owner, attribute, _) in zip(metas, _parameter_locations(layer.name, module), strict=False):
                        setattr(owner, attribute, parameters.get(id(meta), meta))
                layer.unreadable = {}

    def _initial_value(self, layer: Layer, name: str, meta: nn.Parameter, real: nn.Parameter) -> Tensor:
        """Returns the value of a parameter on the host, from its first location, which may be in another layer.

        Raises PlanError "model-init" if the parameter has no value.
        """
        home, home_name, _ = self._homes[id(meta)]
        if home is not layer:
            locations = _parameter_locations(home.name, self.build_module(home))
            real = next(parameter for path, _, _, parameter in locations if path == home_name)
        value = real.detach()
        if not value.is_meta and not value.isnan().any():
            return value
        message = f"the parameter {name!r} has no initial value, or an initial value that is not a number (NaN)"
        hint = "write to it in the factory, or return sley_core.api.model.Model(layers, init_weights)"
        raise PlanError("model-init", message, path=MODEL, hint=hint)

    def _check_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Checks `modules`, by layer, and records in the model's layers the tensors that a forward must not read."""
        _check_structure(self.model, modules)
        for name, module in modules.items():
            check_parameters(name, module)
        unregistered = check_references(modules)
        for name in modules:
            self.model[name].unreadable = {entry.attribute: entry.tensor for entry in unregistered.get(name, ())}


def _parameter_locations(name: str, module: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """Returns the name, module, attribute and parameter of every registration in `module`; a tied parameter has several."""
    return [
        (f"{path}.{attribute}", owner, attribute, parameter)
        for path, owner in module.named_modules(prefix=name, remove_duplicate=False)
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]


@contextmanager
def _plain_pytorch(seed: int) -> Iterator[None]:
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
    """Raises PlanError "model-differs" if the modules, parameters, buffers, shapes or ties in `modules`, by layer, differ from
    those on meta in `model`, or if a parameter is frozen only in `modules`.
    """
    layers = [layer for layer in model.layers if layer.name in modules]
    declared_ties = {second for _, second in model.ties}
    first = dict(_describe_structure([(layer.name, layer.module) for layer in layers], declared_ties))
    second = dict(_describe_structure([(layer.name, modules[layer.name]) for layer in layers], declared_ties))
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            raise _differs_error(f"{name!r} is first {first.get(name, 'missing')}, then {second.get(name, 'missing')}")
    for layer in layers if model.adapt is None else ():
        meta_locations = _parameter_locations(layer.name, layer.module)
        for (name, _, _, meta), (_, _, _, real) in zip(
            meta_locations, _parameter_locations(layer.name, modules[layer.name]), strict=True
        ):
            if name not in declared_ties and meta.requires_grad and not real.requires_grad:
                message = f"the parameter {name!r} is first trained, then frozen by another name or by `init_weights`"
                hint = "freeze it in the factory by its module: `module.weight.requires_grad_(False)`"
                raise PlanError("model-differs", message, path=MODEL, hint=hint)


def _describe_structure(modules: Iterable[tuple[str, nn.Module]], declared_ties: Collection[str]) -> Iterator[tuple[str, str]]:
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
    hint = "let the factory depend only on its options and the data; it is called once without values and once with values"
    return PlanError("model-differs", message, path=MODEL, hint=hint)


def _move_buffers(
    name: str, layer: nn.Module, dtype: torch.dtype, device: torch.device, moved: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Moves the layer's buffers to `device`, in the dtypes of `select_buffer_dtype`; shared buffers stay shared.

    moved: the (old, new) buffers by the id of the old one. Raises PlanError "model-buffer" for a buffer on meta.
    """
    for path, module in layer.named_modules(prefix=name):
        for attribute, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                message = f"the buffer '{path}.{attribute}' was built without values"
                raise PlanError("model-buffer", message, path=MODEL, hint="write to it in the factory")
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer, buffer.to(device=device, dtype=select_buffer_dtype(buffer, dtype))
            setattr(module, attribute, moved[id(buffer)][1])
