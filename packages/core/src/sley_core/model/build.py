"""Builds a model on every rank without memory for its parameters: names, shapes, ties, and buffers with values.

A parameter is moved to the meta device when a module registers it, through torch's public hook; ties keep their identity. What
the factory writes to it is recorded (`record`), and `materialize` replays it on the rank that needs it. `with
torch.device("meta")` would lose all of that, and the values of buffers.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from sley_core.errors import PlanError, PluginError, SleyError
from sley_core.factory import cause
from sley_core.generators import seeded
from sley_core.model.apart import Registered, RegisteredMemory, check_held
from sley_core.model.journal import Journal, unwatched
from sley_core.model.layers import MODEL, Layer, Model, as_model, like, with_fields
from sley_core.model.seeds import derive
from sley_core.model.steps import Ref, is_blank, needed
from sley_core.model.watch import watched

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.plan.plan import Component


def build_on_meta(component: Component, data: DataInfo, seed: int) -> Model:
    """Builds the model of a plan: parameters on meta, buffers on the host, each layer with its fields and recorded values.

    Equal on all ranks if the model's code draws from torch's default generator, `random` and numpy alone, which are seeded by
    `seed` and restored afterwards. Does not communicate. Raises PlanError: what a factory's call raises, and "model-factory",
    "model-field", "model-init", "model-buffer", "model-hook"; PluginError "plugin-failed" if a record's code fails.
    """
    with seeded(derive(seed, "build")), recorded() as building:
        try:
            model = as_model(component.build(data))
        except SleyError:
            raise
        except Exception as error:
            message = f"`{component.name}` failed to build its layers: {cause(error)}"
            raise PluginError("plugin-failed", message, path=MODEL) from error
    building.finish(model)
    check_built(model)
    return with_fields(model, data)


_stand_ins = WeakIdKeyDictionary()
"""The token of the build that made each parameter on meta: a model must not use those of an earlier build."""


class Building:
    """Holds the parameters that a factory registered, and the record of what was written to them."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.meta_of = WeakIdKeyDictionary()
        self.made: list[nn.Parameter] = []  # those on meta, all of them
        self._token = object()

    def to_meta(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the meta parameter that replaces `parameter` in modules; for the journal both are the same memory."""
        if parameter not in self.meta_of:
            self.meta_of[parameter] = like(parameter, self.journal.twin(parameter.data))
            _stand_ins[self.meta_of[parameter]] = self._token
            self.made.append(self.meta_of[parameter])
        meta: nn.Parameter = self.meta_of[parameter]
        return meta

    def finish(self, model: Model) -> None:
        """Completes `model`: all parameters on meta, all buffers with values, and each layer's `written` and `held` set.

        Raises PlanError for memory that a parameter shares other than as a tie, and for values that cannot be replayed.
        """
        registered = [
            Registered(name, tensor, self.journal.ref(tensor))
            for layer in model.layers
            for name, tensor in self._settled(layer)
        ]
        memory = RegisteredMemory(registered)
        memory.check()
        check_held(model.layers, memory, self.journal, self.meta_of.get)
        self._check_computed(model)
        for layer in model.layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name):
                for name, buffer in list(module._buffers.items()):
                    if buffer is not None and not is_traceable_wrapper_subclass(buffer):
                        module._buffers[name] = self._with_values(buffer, f"{prefix}.{name}", model)
        for held in (one for layer in model.layers for one in layer.held):
            if held.tensor in _stand_ins:
                del _stand_ins[held.tensor]  # it will be real
        model.built = self.made

    def _settled(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """Moves the layer's remaining parameters to meta, and fills `layer.written`; yields its parameters and buffers by
        name.
        """
        layer.written = {}
        for prefix, module in layer.module.named_modules(prefix=layer.name):
            for name, parameter in list(module._parameters.items()):
                if parameter is None or is_lazy(parameter):
                    continue
                self._check_plain(f"{prefix}.{name}", parameter)
                if not parameter.is_meta:  # registered by another thread, or by no call at all (unpickled)
                    parameter = module._parameters[name] = self.to_meta(parameter)
                self.journal.settle(parameter)
                layer.written[id(parameter)] = self.journal.ref(parameter)
                yield f"{prefix}.{name}", parameter
            for name, buffer in module._buffers.items():
                if buffer is None or is_lazy(buffer) or is_traceable_wrapper_subclass(buffer):
                    continue
                if buffer.layout is torch.strided:
                    yield f"{prefix}.{name}", buffer

    def _check_computed(self, model: Model) -> None:
        """Raises PlanError "model-init" for a held tensor computed from parameters that `init_weights` will change."""
        for layer in model.layers if model.init_weights is not None else ():
            for held in layer.held:
                if held.ref is not None and self._depends_on_parameters(held.ref, model):
                    message = (
                        f"the tensor `{held.where}` was computed from parameters, which `init_weights` changes later"
                    )
                    hint = "compute it in the forward, or give the parameters their values before"
                    raise PlanError("model-init", message, path=MODEL, hint=hint)

    def _with_values(self, buffer: Tensor, name: str, model: Model) -> Tensor:
        """Returns the buffer with values, computing one that was written on meta.

        Raises PlanError "model-buffer" for a buffer without values, and for one computed from parameters that
        `init_weights` changes.
        """
        if not buffer.is_meta:
            self.journal.refresh(buffer)
            return buffer
        if buffer not in self.meta_of:
            ref = self.journal.ref(buffer)
            if is_blank(ref):
                raise _refused_buffer(f"the buffer {name!r} was built without values", "write to it in the factory")
            if model.init_weights is not None and self._depends_on_parameters(ref, model):
                message = f"the buffer {name!r} was computed from parameters, which `init_weights` changes later"
                raise _refused_buffer(
                    message, "compute it in `init_weights`, or give the parameters their values before"
                )
            self.meta_of[buffer] = self.journal.realised(buffer)
        value: Tensor = self.meta_of[buffer]
        return value

    def _depends_on_parameters(self, ref: Ref, model: Model) -> bool:
        """Returns whether the value of `ref` was computed from a parameter of `model`."""
        cells = {
            self.journal.cell(one) for layer in model.layers for one in layer.module.parameters() if not is_lazy(one)
        }
        return any(cell in cells for step in needed([ref]) for cell in step.reads)

    def _check_plain(self, name: str, parameter: nn.Parameter) -> None:
        """Raises PlanError for a parameter that cannot be replayed: a subclass, sparse, or of another build.

        A hook on its accumulated gradient is "model-hook": the run installs its own there.
        """
        if is_traceable_wrapper_subclass(parameter) or parameter.layout is not torch.strided:
            kind = type(parameter).__name__
            why, hint = f"it is a {kind}, not a plain dense tensor", "give the module a plain tensor"
        elif parameter in _stand_ins and _stand_ins[parameter] is not self._token:
            why = "it belongs to a model that was built before this one"
            hint = "make new modules in each call of the factory"
        elif parameter._post_accumulate_grad_hooks:
            message = f"the parameter {name!r} has a hook on its accumulated gradient, which is the run's own"
            hint = "use `register_hook`, or a gradient handler (docs/write-a-plugin.md)"
            raise PlanError("model-hook", message, path=MODEL, hint=hint)
        else:
            return
        message = f"the first value of the parameter {name!r} cannot be kept: {why}"
        raise PlanError("model-init", message, path=MODEL, hint=hint)


@contextmanager
def recorded() -> Iterator[Building]:
    """Returns a context manager that acts as `parameters_on_meta`, and also records what is written to parameters."""
    building = Building()
    with parameters_on_meta(building.to_meta), warnings.catch_warnings():
        # raised by load_state_dict for parameters on meta, whose values are recorded
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter in the checkpoint to a meta")
        with watched(building.journal, building.meta_of.get):
            yield building


@contextmanager
def parameters_on_meta(to_meta: Callable[[nn.Parameter], nn.Parameter] | None = None) -> Iterator[None]:
    """Returns a context manager that moves every parameter that this thread registers to meta; a tie stays one meta parameter.

    to_meta: makes the meta parameter, called once for each. torch's hook is global, so other threads are filtered out.
    """
    meta_of = WeakIdKeyDictionary()
    builder = threading.get_ident()

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Returns the meta parameter to register in place of `parameter`; None leaves it as it is."""
        if threading.get_ident() != builder or parameter is None or is_lazy(parameter):
            return None
        with unwatched():
            if parameter.is_meta or is_traceable_wrapper_subclass(parameter):
                return None
            if parameter not in meta_of:
                meta_of[parameter] = to_meta(parameter) if to_meta else like(parameter, parameter.data.to("meta"))
            meta: nn.Parameter = meta_of[parameter]
        return meta

    hook: Callable[..., Any] = register  # torch's annotation forgets that a hook may return a parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _refused_buffer(message: str, hint: str) -> PlanError:
    return PlanError("model-buffer", message, path=MODEL, hint=hint)


def check_built(model: Model) -> None:
    """Raises PlanError for a lazy or integer parameter; asserts that parameters are on meta and buffers are not."""
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
            assert not buffer.is_meta, f"{name} was left without values"
