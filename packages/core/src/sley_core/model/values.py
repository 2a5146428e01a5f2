"""Gives the layers that a rank owns their first values, which are the same in every layout: those of plain PyTorch.

The factory of a model on meta runs again, on the host, with generators as `torch.manual_seed(seed)` leaves them, and then
`init_weights(module, name)` of the model, if it has one, for every module. The modules that they make replace those on meta in
the layers that this rank owns, with parameters cut, cast and moved. Layers with builders are made one after the other, so that
one at a time has its whole values in memory. Meanwhile torch fills new memory with NaN, and a parameter that is NaN afterwards
is refused by name: nothing has written it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.generators import use_program_seed
from sley_core.model.build import NoDrawsOnMeta, Recipe, check_parameters
from sley_core.model.layers import MODEL, Layer, Model, like
from sley_core.model.tensors import buffer_format, check_held, checksum, parameter_format

Places = list[tuple[str, nn.Module, str, nn.Parameter]]
"""Name, module, attribute and parameter of every place that holds one; a tied parameter has several."""


class HostModel:
    """Holds a model's layers with values on the host: those of its factory all at once, those of builders on request.

    model: as `build_on_meta` made it. Raises PlanError: what the factory raises, "model-init" for memory that a parameter
    shares other than as a tie, and "model-differs" if the factory makes another model than the first time.
    """

    def __init__(self, model: Model) -> None:
        recipe: Recipe = model.recipe
        self.model = model
        self._seed = recipe.seed
        with _plain(self._seed):
            self._made = recipe.call()
            self._made.initialise()
            for layer in self._made.layers:
                if layer.builder is None:
                    self._made.adapt_layer(layer, self._seed)
        kinds = [[(layer.name, layer.builder is None) for layer in one.layers] for one in (model, self._made)]
        if kinds[0] != kinds[1]:
            raise _differs(f"first of the layers {_named(kinds[0])}, and then of {_named(kinds[1])}")
        whole = {layer.name: layer.module for layer in self._made.layers if layer.builder is None}
        for layer in model.layers:
            if layer.name in whole:
                _check_structure(layer, whole[layer.name])
        _check_parameters(model, whole)
        self._record_unreadable(whole)
        # By id, the first place of each parameter on meta, and the parameter, so that no other object gets its id.
        self._homes: dict[int, tuple[Layer, str, nn.Parameter]] = {}
        for layer in model.layers:
            for name, _, _, parameter in _places(layer.name, layer.module):
                self._homes.setdefault(id(parameter), (layer, name, parameter))

    def made(self, layer: Layer) -> nn.Module:
        """Returns the module of `layer` that the factory made, on the host; an empty one if the layer has a builder."""
        return self._made[layer.name].module

    def module(self, layer: Layer) -> nn.Module:
        """Returns the module of `layer` with values on the host. If the layer has a builder, it is called now."""
        own = self._made[layer.name]
        if own.builder is None:
            return own.module
        with _plain(self._seed):
            self._made.build_layer(own, self._seed)
            self._made.adapt_layer(own, self._seed)
        module, own.module = own.module, nn.Module()
        _check_structure(layer, module)
        _check_parameters(self.model, {layer.name: module})
        self._record_unreadable({layer.name: module})
        return module

    @torch.no_grad()
    def place(
        self,
        owned: Collection[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        cut: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
        keep: Sequence[str] = (),
    ) -> dict[int, nn.Parameter]:
        """Puts modules with values into the layers `owned`, by name: parameters of `dtype`, cut, and buffers in their formats,
        on `device`. Returns the new parameters by id of those on meta.

        cut: by id of a parameter on meta, a function from its full value on the host to the shard that this rank keeps. keep:
        patterns of parameters in fp32. Modules have the modes of those that they replace, and parameters their `requires_grad`.
        Does not communicate. Raises PlanError "model-init" for a parameter, "model-buffer" for a buffer without values.
        """
        final: dict[int, nn.Parameter] = {}
        buffers: dict[int, tuple[Tensor, Tensor]] = {}
        own = [layer for layer in self.model.layers if layer.name in owned]
        for layer in own:
            before, module = _places(layer.name, layer.module), self.module(layer)
            for (name, _, _, meta), (_, holder, attribute, real) in zip(before, _places(layer.name, module), strict=True):
                if id(meta) not in final:
                    value = self._value(layer, name, meta, real)
                    if self.model.adapt is not None and not meta.requires_grad:
                        self.model.base_digests[self._homes[id(meta)][1]] = checksum(value)
                    if is_cut := cut is not None and id(meta) in cut:
                        value = cut[id(meta)](value)
                    # A copy, since the factory's memory may be numpy's, a file's, or a part of something larger.
                    value = value.to(device=device, dtype=parameter_format(name, dtype, keep), copy=not is_cut)
                    final[id(meta)] = like(real, value)
                    final[id(meta)].requires_grad_(meta.requires_grad)
                setattr(holder, attribute, final[id(meta)])
            _move_buffers(layer.name, module, dtype, device, buffers)
            _copy_modes(layer.module, module)
            layer.module = module
        return final

    def drop_unowned(self, final: Mapping[int, nn.Parameter], owned: Collection[str]) -> None:
        """Drops the values of layers that are not `owned`, but for the parameters in `final`. Nothing is placed after it."""
        for layer in self.model.layers:
            if layer.name not in owned:
                metas = [meta for _, _, _, meta in _places(layer.name, layer.module)]
                for module in (layer.module, self.made(layer)):  # modules of other layers may refer to the latter
                    for meta, (_, holder, attribute, _) in zip(metas, _places(layer.name, module), strict=False):
                        setattr(holder, attribute, final.get(id(meta), meta))
                layer.unreadable = {}

    def _value(self, layer: Layer, name: str, meta: nn.Parameter, real: nn.Parameter) -> Tensor:
        """Returns the value of a parameter on the host: of the first place that holds it, which may be in another layer. Raises
        PlanError "model-init" if it has none.
        """
        home, place, _ = self._homes[id(meta)]
        if home is not layer:
            real = next(parameter for path, _, _, parameter in _places(home.name, self.module(home)) if path == place)
        value = real.detach()
        if not value.is_meta and not value.isnan().any():
            return value
        message = f"the parameter {name!r} has no first value: nothing wrote all of it, or it is not a number (NaN)"
        hint = "write to it in the factory, or return sley_core.api.model.Model(layers, init_weights)"
        raise PlanError("model-init", message, path=MODEL, hint=hint)

    def _record_unreadable(self, modules: Mapping[str, nn.Module]) -> None:
        """Checks what the layers `modules` refer to, and notes in the model's layers what must not be read."""
        for name, module in modules.items():
            check_parameters(name, module)
        unregistered = check_held(modules)
        for name in modules:
            self.model[name].unreadable = {held.where: held.tensor for held in unregistered.get(name, ())}


def _places(name: str, module: nn.Module) -> Places:
    return [
        (f"{path}.{attribute}", holder, attribute, parameter)
        for path, holder in module.named_modules(prefix=name, remove_duplicate=False)
        for attribute, parameter in holder.named_parameters(recurse=False, remove_duplicate=False)
    ]


@contextmanager
def _plain(seed: int) -> Iterator[None]:
    """Seeds generators as `torch.manual_seed(seed)` in plain PyTorch; memory that nobody wrote is NaN within the block."""
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Not torch.use_deterministic_algorithms, which imports the compiler (`uncompiled.py`).
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        with use_program_seed(seed), NoDrawsOnMeta():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch._C._set_deterministic_algorithms(was, warn_only=warns)


def _check_structure(layer: Layer, module: nn.Module) -> None:
    """Raises PlanError "model-differs" if `module` has other modules, parameters, buffers or shapes than `layer`, on meta."""
    first, second = (dict(_described(layer.name, one)) for one in (layer.module, module))
    for name in [*first, *(name for name in second if name not in first)]:
        if first.get(name) != second.get(name):
            raise _differs(f"{name!r} is first {first.get(name, 'not there')}, and then {second.get(name, 'not there')}")


def _described(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the names of modules, parameters and buffers with what must be equal."""
    for path, each in module.named_modules(prefix=name, remove_duplicate=False):
        yield path, f"a {type(each).__name__}"
        for kind, registered in (("parameter", each._parameters), ("buffer", each._buffers)):
            for attribute, tensor in registered.items():
                if tensor is not None:
                    yield f"{path}.{attribute}", f"a {kind} {list(tensor.shape)}"


def _check_parameters(model: Model, modules: Mapping[str, nn.Module]) -> None:
    """Raises PlanError "model-differs" if parameters that the factory tied in layers of `model`, on meta, are not tied in those
    layers' `modules` with values, or the other way, and for those that are frozen in `modules` alone.
    """
    tied = {second for _, second in model.ties}
    real_of: dict[int, nn.Parameter] = {}
    meta_of: dict[int, nn.Parameter] = {}
    for layer in model.layers:
        if layer.name in modules:
            places = zip(_places(layer.name, layer.module), _places(layer.name, modules[layer.name]), strict=True)
            for (name, _, _, meta), (_, _, _, real) in places:
                if name in tied:
                    continue
                if model.adapt is None and meta.requires_grad and not real.requires_grad:
                    message = f"the parameter {name!r} is first trained, and then frozen, by another name or by `init_weights`"
                    hint = "freeze it in the factory, by its module: `module.weight.requires_grad_(False)`"
                    raise PlanError("model-differs", message, path=MODEL, hint=hint)
                if real_of.setdefault(id(meta), real) is not real or meta_of.setdefault(id(real), meta) is not meta:
                    raise _differs(f"{name!r} is tied to another parameter in one of them alone")


def _differs(what: str) -> PlanError:
    message = f"the factory made two models in two calls: {what}"
    hint = "a factory runs once without values and once with values: let it depend on its options and the data alone"
    return PlanError("model-differs", message, path=MODEL, hint=hint)


def _named(layers: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(name if is_module else f"{name} (a builder)" for name, is_module in layers)


def _copy_modes(before: nn.Module, module: nn.Module) -> None:
    """Puts `module` and those in it into the modes of `before`, by `train()`, which a module may override."""
    module.train()
    for old, new in zip(before.modules(), module.modules(), strict=True):
        new.training = old.training


def _move_buffers(
    name: str, layer: nn.Module, dtype: torch.dtype, device: torch.device, moved: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Moves the layer's buffers to `device`, in their formats beside parameters of `dtype`; shared buffers stay shared. moved:
    (old, new) buffer by id of the old one, kept so that no other gets its id. Raises PlanError "model-buffer" for one on meta.
    """
    for path, module in layer.named_modules(prefix=name):
        for attribute, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                message = f"the buffer '{path}.{attribute}' was built without values"
                raise PlanError("model-buffer", message, path=MODEL, hint="write to it in the factory")
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer, buffer.to(device=device, dtype=buffer_format(buffer, dtype))
            setattr(module, attribute, moved[id(buffer)][1])
