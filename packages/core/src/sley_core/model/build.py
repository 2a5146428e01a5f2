"""Builds the model of a plan on meta, with the names, shapes and ties of its parameters but without memory for them.

A factory runs twice; this is the first run. A hook of torch moves each parameter to the meta device when a module registers it.
Tied parameters stay one object. Buffers and everything else are computed as usual. (Within `torch.device("meta")`
common code such as `torch.linspace(0, rate, depth).tolist()` would fail.) `HostModel` (`values.py`) runs the factory again, for
values. If the factory needs the values of parameters, both runs are on the host.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from sley_core.errors import PlanError, PluginError, SleyError, format_cause, shorten_names
from sley_core.generators import find_function_generators, use_program_seed
from sley_core.model.layers import MODEL, Layer, Model, as_model, parameter_like, set_fields
from sley_core.model.tensors import check_references

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.plan.plan import Component


@dataclass(frozen=True)
class Recipe:
    """Everything that is needed to call the model factory of a plan again.

    seed: the seed of the factory's generators. adapters: the adapters of the plan, or None. needs_host: the error of the
    factory on meta; "" if it runs there.
    """

    component: "Component"
    data: "DataInfo"
    seed: int
    adapters: "Component | None" = None
    needs_host: str = ""

    def call(self) -> Model:
        """Calls the factory and returns its model, without calling builders.

        Raises PlanError, or PluginError "plugin-failed" for a plugin's factory.
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
    """Builds the model of a plan with parameters on meta, and sets the fields of its layers. Does not communicate.

    Structures may depend on draws from `random` and numpy, seeded by `seed`, but not on torch's. Generators are restored.
    Raises PlanError "model-factory", "model-field", "model-init", "model-hook", the factory's own PlanErrors, and PluginError
    "plugin-failed" if a plugin's code fails.
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
    """Runs the factory and its builders. on_meta: whether parameters move to meta when registered, or only afterwards."""
    context = parameters_on_meta(to_meta) if on_meta else nullcontext()
    with use_program_seed(recipe.seed), _preserve_defaults(), context:
        model = recipe.call()
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
    """Moves the layer's parameters to meta. Raises the same errors as `check_parameters`."""
    check_parameters(layer.name, layer.module, to_meta)
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
    """Raises PlanError for a builder whose result would depend on which other builders a rank has called.

    "model-factory": a parameter is shared with another layer. "model-random": a generator was made outside the builder.
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
                message = f"{name!r} and {first_name!r} are one parameter that was created outside the builders of their layers"
                hint = f"create the parameter in each builder, and return Model(layers, ties=[({first_name!r}, {name!r})])"
                raise PlanError("model-factory", message, path=MODEL, hint=hint)


_builds = WeakIdKeyDictionary()
"""The `MetaParameters` that made each parameter on meta. A model must not use parameters of an earlier build."""


class MetaParameters:
    """Maps each real parameter to the one parameter on meta that replaces it in modules."""

    def __init__(self) -> None:
        self._replacements = WeakIdKeyDictionary()

    def replacement(self, tensor: Tensor) -> Tensor | None:
        """Returns the parameter on meta that replaces `tensor` in modules, or None."""
        parameter: Tensor | None = self._replacements.get(tensor)  # type: ignore[no-untyped-call]
        return parameter

    def __call__(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._replacements:
            if parameter._backward_hooks is None:
                parameter._backward_hooks = OrderedDict()  # the same dict, for hooks that the real one gets later
            self._replacements[parameter] = parameter_like(parameter, parameter.data.to("meta"))
            _builds[self._replacements[parameter]] = self
        meta: nn.Parameter = self._replacements[parameter]
        return meta


class NoDrawsOnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips in-place draws such as `normal_` on meta, which torch runs slowly after importing its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing compiled runs in this mode, and True would import torch's compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if draws and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def parameters_on_meta(to_meta: MetaParameters) -> Iterator[None]:
    """Within the block, moves parameters to meta when this thread registers them; preserves ties.

    to_meta: maps each real parameter to its parameter on meta. torch's hook is global, so it ignores other threads.
    """
    builder = threading.get_ident()

    def register(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Returns the meta parameter to register instead of `parameter`, or None to keep `parameter`."""
        if threading.get_ident() != builder or parameter is None or is_lazy(parameter):
            return None
        if parameter.is_meta or is_traceable_wrapper_subclass(parameter):
            return None
        return to_meta(parameter)

    hook: Callable[..., Any] = register  # torch's annotation forgets that a hook may return a parameter
    handle = register_module_parameter_registration_hook(hook)
    try:
        with warnings.catch_warnings(), NoDrawsOnMeta():  # type: ignore[no-untyped-call]
            # raised by load_state_dict, whose values the second run has
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter in the checkpoint to a meta")
            yield
    finally:
        handle.remove()


def check_parameters(name: str, module: nn.Module, build: MetaParameters | None = None) -> None:
    """Raises PlanError for an unsupported parameter of the layer `name`.

    "model-init": it is lazy, integer, sparse, of a tensor subclass or of an earlier build. "model-hook": its accumulated
    gradient has a hook.
    """
    for path, parameter in module.named_parameters(name):
        kind, code = type(parameter).__name__, "model-init"
        if is_lazy(parameter):
            reason, hint = ("has no shape yet", "pass the input size to the module, or call it once in the factory")
        elif not parameter.is_floating_point():
            reason, hint = f"is {parameter.dtype}, but parameters must be floating-point", "register it as a buffer"
        elif is_traceable_wrapper_subclass(parameter) or parameter.layout is not torch.strided:
            reason, hint = f"is a {kind}, but must be a plain dense tensor", "use a plain tensor in the module"
        elif parameter in _builds and _builds[parameter] is not build:
            reason = "belongs to a model that an earlier call built"
            hint = "create new modules in each call, since a factory and a builder are called more than once"
        elif parameter._post_accumulate_grad_hooks:
            code, reason = "model-hook", "has a hook on its accumulated gradient, which only the run may use"
            hint = "use `register_hook`, or write a gradient handler (docs/write-a-plugin.md)"
        else:
            continue
        raise PlanError(code, f"the parameter {path!r} {reason}", path=MODEL, hint=hint)


MAX_NAMES = 3
"""The largest number of names that a message lists."""


def is_per_rank(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether training may write the buffer `name`: whether it matches `patterns` (`Model.per_rank_buffers`)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_written_buffers(buffers: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises PlanError "model-buffer-written" if `buffers`, the name and module of each written buffer, is not empty.

    A running mean, for example, is the mean of only this rank's samples, since it is not reduced.
    """
    if not buffers:
        return
    types = " and ".join(dict.fromkeys(type(module).__name__ for _, module in buffers))
    names = ", ".join(f"`{name}`" for name, _ in buffers[:MAX_NAMES]) + (", ..." if len(buffers) > MAX_NAMES else "")
    num_buffers = f"{len(buffers)} buffer{'' if len(buffers) == 1 else 's'}"
    patterns = ", ".join(dict.fromkeys(f'"*.{name.rpartition(".")[2]}"' for name, _ in buffers))
    alternative = ", or use GroupNorm" if any(isinstance(module, _NormBase) for _, module in buffers) else ""
    raise PlanError(
        "model-buffer-written",
        f"training updates {num_buffers} of {types} ({names}), whose values would differ between ranks",
        path=MODEL,
        hint="to keep separate values per replica, return `sley_core.api.model.Model(layers, "
        f"per_rank_buffers=({patterns},))` from the factory{alternative}",
    )


def set_train_mode(model: Model) -> None:
    """Puts the layers of `model` into training mode, except modules that must stay in evaluation mode.

    Calls torch's `train()`, which a module may override, because `from_pretrained` returns a model in evaluation mode, without
    dropout. Afterwards, a program may call `eval()` on modules of a run. Two kinds of modules stay in evaluation mode if the
    factory left them in it:

    * a frozen module within one in training mode: the factory has called `eval()` on it;
    * a BatchNorm whose statistics may not be written, since ranks do not share them.
    """
    is_training = any(layer.module.training for layer in model.layers)
    for layer in model.layers:
        modules = list(_modules_in_evaluation(layer.module, layer.name, model.per_rank_buffers, is_training))
        modes = [(part, part.training) for module in modules for part in module.modules()]
        layer.module.train()
        for part, mode in modes:
            part.training = mode


def evaluation_notes(layers: Sequence[Layer]) -> list[str]:
    """Returns a note for the user that lists the outermost modules in evaluation mode; [] if there are none."""
    modules = [pair for layer in layers for pair in layer.module.named_modules(prefix=layer.name)]
    names = {name: None for name, module in modules if not module.training}
    outermost = [name for name in names if name.rpartition(".")[0] not in names]
    message = f"the factory left these modules in evaluation mode, and they stay in it: {shorten_names(outermost, MAX_NAMES)}"
    return [message] if outermost else []


def _modules_in_evaluation(module: nn.Module, name: str, per_rank: Sequence[str], is_training: bool) -> Iterator[nn.Module]:
    """Yields the modules that stay in evaluation mode. is_training: whether the parent is in training mode.

    per_rank: patterns, as in `is_per_rank`.
    """
    is_norm = isinstance(module, _NormBase) and not is_per_rank(f"{name}.running_mean", per_rank)
    flags = [parameter.requires_grad for parameter in module.parameters()]
    is_frozen = bool(flags) and not any(flags)
    if not module.training and (is_norm or (is_training and is_frozen)):
        yield module
        return
    for key, child in module.named_children():
        yield from _modules_in_evaluation(child, f"{name}.{key}", per_rank, module.training)
