"""What a factory's own module calls its weights: the names that its `load_state_dict` takes.

A factory returns layers, and the registry calls a weight by its layer: `3.attn.weight` for the fourth of a list. The layers are
mostly parts of a module that the factory made and let go of, in which the same weight is `h.2.attn.weight`. So the factory is
called once more, on meta, and who registers which modules is noted: the module that has all of the model's parameters is it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from sley_core.assemble import draft_model
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.engine.registry import ParameterRegistry

if TYPE_CHECKING:
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan


class ModuleNames(NamedTuple):
    """names: by name of the registry, of parameters and buffers, those of the factory's own module. module: its class; empty if
    the model is no part of one module, so that names are those of the registry. missing: what its state has and the model does
    not.
    """

    names: Mapping[str, list[str]]
    module: str
    missing: list[str]


def own_names(plan: Plan) -> ModuleNames:
    """Returns what the model of `plan` is called by its own module. Imports and calls the factory, without memory for weights.

    Raises what the data and the factory raise.
    """
    info = open_dataset(plan.data, DataContext(plan.run.seed, "train")).info
    with _noted() as holders:
        model = draft_model(plan, info)
    return _names(model, holders)


@contextmanager
def _noted() -> Iterator[dict[int, nn.Module]]:
    """Notes, by id, every module that registers another one inside the context."""
    holders: dict[int, nn.Module] = {}

    def note(holder: nn.Module, _name: str, _module: nn.Module | None) -> None:
        holders[id(holder)] = holder

    hook: Any = note
    handle = register_module_module_registration_hook(hook)
    try:
        yield holders
    finally:
        handle.remove()


def _names(model: Model, holders: Mapping[int, nn.Module]) -> ModuleNames:
    """Returns the names in the one module among `holders` that has all parameters and is in no other such one."""
    parameters = {id(one): name for name, one in _parameters(model).items()}
    layers = {id(layer.module) for layer in model.layers}
    whole = [
        module
        for key, module in holders.items()
        if key not in layers and parameters.keys() <= {id(one) for one in module.parameters()}
    ]
    inner = {id(one) for module in whole for one in module.modules() if one is not module}
    outermost = [module for module in whole if id(module) not in inner]
    names: dict[str, list[str]] = {name: [] for name in parameters.values()}
    if len(outermost) != 1:
        registry = ParameterRegistry([model.layers])
        names = {param.name: [param.name, *param.aliases] for param in registry}
        return ModuleNames(names | {name: [name] for name, _ in _buffers_of(model)}, "", [])
    (root,) = outermost
    places = {place: name for name, place in _buffers_of(model)}
    names |= {name: [] for name in places.values()}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if id(parameter) in parameters:
                names[parameters[id(parameter)]].append(f"{prefix}.{attribute}".lstrip("."))
        for attribute in module._buffers:
            if (id(module), attribute) in places:
                names[places[id(module), attribute]].append(f"{prefix}.{attribute}".lstrip("."))
    given = {name for several in names.values() for name in several}
    return ModuleNames(names, type(root).__name__, [name for name in root.state_dict() if name not in given])


def _parameters(model: Model) -> dict[str, torch.Tensor]:
    return {param.name: param.parameter for param in ParameterRegistry([model.layers])}


def _buffers_of(model: Model) -> Iterable[tuple[str, tuple[int, str]]]:
    """Yields the registry's name, and the place, of each buffer that belongs to the model's state."""
    for layer in model.layers:
        for prefix, module in layer.module.named_modules(prefix=layer.name):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", (id(module), name)
