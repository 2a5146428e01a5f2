"""Builds a model on every rank without memory for its parameters: names, shapes, ties, and buffers with values.

Parameters are moved to the meta device in the moment in which a module registers them, through torch's public hook for
that; ties keep their identity. `with torch.device("meta")` would lose the values of buffers (rotary tables, masks,
constants), which cannot be drawn again later. `materialize` gives the parameters their values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from sley_core.errors import PlanError, PluginError, SleyError
from sley_core.model.layers import MODEL, Model, as_model, with_fields
from sley_core.model.seeds import derive
from sley_core.plan.factory import cause

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.plan.plan import Component


def build_on_meta(component: Component, data: DataInfo, seed: int) -> Model:
    """The model of a plan: parameters on meta, buffers on the host, each layer knowing its fields.

    Equal on all ranks, as long as the model's code draws from torch's default generator alone, which is seeded by `seed`
    and afterwards left as it was. Nothing is read but code.
    Raises PlanError: what a factory's call raises, and "model-factory", "model-field", "model-init", "model-buffer";
    PluginError "plugin-failed" where a record's code fails.
    """
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        torch.default_generator.manual_seed(derive(seed, "build"))
        try:
            model = as_model(component.build(data))
        except SleyError:
            raise
        except Exception as error:
            message = f"`{component.name}` failed to build its layers: {cause(error)}"
            raise PluginError("plugin-failed", message, path=MODEL) from error
    check_built(model)
    return with_fields(model, data)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter that this thread registers is on meta; one registered twice is one meta parameter.

    torch's hook is global, hence the look at the thread.
    """
    meta_of = WeakIdKeyDictionary()
    builder = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != builder or parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        if parameter not in meta_of:
            meta_of[parameter] = like(parameter, parameter.data.to("meta"))
        meta: nn.Parameter = meta_of[parameter]
        return meta

    hook: Callable[..., Any] = to_meta  # torch's annotation forgets that a hook may return a parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A new parameter over `data`, with the old one's `requires_grad` and whatever a user hung on it."""
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def check_built(model: Model) -> None:
    """Every parameter is a floating-point tensor on meta and every buffer has values; else PlanError."""
    for layer in model.layers:
        for name, parameter in layer.module.named_parameters(layer.name):
            if is_lazy(parameter):
                hint = "give the module its input size, or run it once in the factory"
                raise PlanError("model-init", f"the shape of {name!r} is not known yet", path=MODEL, hint=hint)
            if not parameter.is_floating_point():
                hint = "make it a buffer"
                message = f"the parameter {name!r} is {parameter.dtype}; parameters are floating-point numbers"
                raise PlanError("model-init", message, path=MODEL, hint=hint)
            assert parameter.is_meta, f"{name} was built on {parameter.device}"
        for name, buffer in layer.module.named_buffers(layer.name):
            if buffer.is_meta:
                hint = "compute it from sizes, not from parameters, and not under torch.device('meta')"
                raise PlanError("model-buffer", f"the buffer {name!r} was built without values", path=MODEL, hint=hint)
