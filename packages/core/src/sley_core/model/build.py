"""Builds a model on every rank without memory for its parameters: names, shapes, ties, and buffers with values.

Parameters are moved to the meta device in the moment in which a module registers them, through torch's public hook for
that; ties keep their identity. `with torch.device("meta")` would lose the values of buffers (rotary tables, masks,
constants), which cannot be drawn again later. `materialize` gives the parameters their values.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from sley_core.errors import PlanError, SleyError
from sley_core.model.layers import MODEL, Model, as_model, with_fields
from sley_core.model.seeds import derive

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.plan.plan import Component


def build_on_meta(component: Component, data: DataInfo, seed: int) -> Model:
    """The model of a plan: parameters on meta, buffers on the host, each layer knowing its fields.

    Equal on all ranks, as long as the factory draws from torch's default generator alone, which is seeded by `seed`
    and afterwards left as it was. Nothing is read but code. Raises PlanError with one of the codes
    factory-import, factory-options, factory-failed, model-factory, model-field, model-init, model-buffer.
    """
    factory, arguments, name = _factory(component, data)
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        torch.default_generator.manual_seed(derive(seed, "build"))
        try:
            returned = factory(*arguments[0], **arguments[1])
            model = as_model(returned)
        except SleyError:
            raise
        except Exception as error:
            raise _failed(name, error) from error
    check_built(model)
    return with_fields(model, data)


def import_from(folder: Path) -> None:
    """From now on, modules in `folder` can be imported: a plan's folder, when the plan names a factory."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def import_factory(path: str) -> Any:
    """The object that `"package.module:attribute"` names, or PlanError "factory-import" with the cause."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            cause = f"there is no module {absent!r}"
            hint = "modules are looked for in the plan's folder and among what is installed"
        else:
            cause, hint = cause_of(error), None
        raise PlanError("factory-import", f"{path!r} cannot be imported: {cause}", path=_KEY, hint=hint) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__file__", None) or getattr(found, "__name__", part)
            message = f"{path!r} cannot be imported: {where} has no {part!r}"
            raise PlanError("factory-import", message, path=_KEY)
        found = getattr(found, part)
    return found


_KEY = (*MODEL, "factory")
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _factory(component: Component, data: DataInfo) -> tuple[Callable[..., Any], _Arguments, str]:
    """What to call, with what, and its name in errors."""
    if component.record is not None:
        return component.record.load(), ((component.config, data), {}), component.name
    config: Any = component.config
    factory = import_factory(config.factory)
    if not callable(factory):
        message = f"{config.factory!r} is a {type(factory).__name__}, which cannot be called"
        raise PlanError("factory-import", message, path=_KEY)
    options = dict(config.options)
    try:
        signature = inspect.signature(factory)
        if "data" in signature.parameters:
            if "data" in options:
                raise TypeError("'data' is what Sley passes; it cannot be an option")
            options["data"] = data
        signature.bind(**options)
    except TypeError as error:
        message = f"{config.factory!r} cannot be called with these options: {error}"
        raise PlanError("factory-options", message, path=(*MODEL, "options")) from error
    except ValueError:
        pass  # a callable without a readable signature: calling it will tell
    return factory, ((), options), config.factory


def _failed(name: str, error: Exception) -> PlanError:
    return PlanError("factory-failed", f"{name!r} failed to build the model: {cause_of(error)}", path=MODEL)


def cause_of(error: Exception) -> str:
    """Type, message and place of the error, in one line: the place is the innermost one in the user's files."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", sys.prefix, sys.base_prefix))]
    frame = (own or frames)[-1]
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''} ({frame.filename}:{frame.lineno})"


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
