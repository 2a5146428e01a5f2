"""Gives the parameters of the layers that a rank owns their first values, which are the same in every layout.

A parameter's first value is the last thing that the model's factory wrote to it: by constructors, `nn.init`, `load_state_dict`
or from files. It was recorded when the model was built (`record`) and is replayed here, one layer after another, on the host in
the dtype that the factory gave it, then cut, cast and moved. So the values do not depend on the device or on which layers this
rank owns, and no rank holds the full model.

Two things follow, module by module from the innermost outwards, under a seed derived from the run's seed and the module's name:

1. a module with a parameter without a value (`torch.empty`, `torch.device("meta")`), its own or a submodule's, runs its
`reset_parameters()` (or `_reset_parameters()`, as torch's attention calls it), which changes only such parameters;
2. the model's `init_weights(module, name)`, if there is one, is called for every module; its values win.

A parameter that is NaN or has no value after that is an error that names it. A parameter that several modules hold (a tie) has
the values of the first of them; a submodule that several layers hold belongs to the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.factory import cause
from sley_core.generators import seed_host, seeded
from sley_core.model.formats import buffer_format, parameter_format
from sley_core.model.layers import MODEL, InitWeights, Layer, like
from sley_core.model.seeds import derive
from sley_core.model.steps import ChangedError, is_blank, replay

_Moved: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Slot:
    """Names a module attribute that holds a parameter, and the meta parameter that was built there."""

    module: nn.Module
    attribute: str
    name: str
    meta: nn.Parameter


@torch.no_grad()
def materialize(
    layers: Sequence[Layer],
    *,
    seed: int,
    init_weights: InitWeights | None = None,
    dtype: torch.dtype,
    device: torch.device,
    owned: Collection[str] | None = None,
    cut: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
    keep: Sequence[str] = (),
) -> None:
    """Makes every parameter of the owned layers real: `dtype`, on `device`, initialised, cut, and tied as it was built.

    layers: all layers of the model, as `build_on_meta` made them, owned or not, since any of them may share a parameter. owned:
    names of the layers to materialize, None for all; the others stay on meta. cut: by id of a meta parameter, a function from
    its full value on the host to the shard that this rank keeps.

    Replaces parameters in the modules in place and frees what was recorded for all layers; does not communicate. Buffers of
    owned layers are moved to `device` and keep their formats. keep: patterns of parameters in fp32. A rank that does not
    own the first holder of a tied parameter initialises that layer too, temporarily. Raises PlanError "model-init" with the
    name of a parameter that nothing initialises.
    """
    owned = {layer.name for layer in layers} if owned is None else set(owned)
    drawing = _Drawing(layers, seed, init_weights)
    final: dict[int, nn.Parameter] = {}
    buffers: dict[int, _Moved] = {}
    real = {id(module) for layer in layers if layer.name in owned for module in layer.module.modules()}
    drawn = [layer for layer in layers if layer.name in owned or drawing.is_needed_by(layer.name, owned)]
    for layer in layers:
        if layer not in drawn:
            layer.written, layer.held = {}, []  # frees the recorded steps
    for layer in drawn:
        values = drawing.draw(layer)
        for slot in drawing.slots[layer.name]:
            if layer.name not in owned:
                # A module that an earlier, owned layer also holds keeps that layer's parameter.
                known = final.get(id(slot.meta)) if id(slot.module) in real else None
                setattr(slot.module, slot.attribute, slot.meta if known is None else known)
                continue
            if id(slot.meta) not in final:
                value = values.pop(id(slot.meta))
                if cut and id(slot.meta) in cut:
                    value = cut[id(slot.meta)](value)
                final[id(slot.meta)] = like(
                    slot.meta, value.to(device=device, dtype=parameter_format(slot.name, dtype, keep))
                )
            setattr(slot.module, slot.attribute, final[id(slot.meta)])
        if layer.name in owned:
            _fill_held(layer)
            _move_buffers(layer.module, dtype, device, buffers)
        layer.written, layer.held = {}, [held for held in layer.held if held.ref is None]


class _Drawing:
    """Computes the first values of single layers; knows to which layer each parameter and module belongs."""

    def __init__(self, layers: Sequence[Layer], seed: int, init_weights: InitWeights | None) -> None:
        """Assigns each parameter and module to the first layer that holds it, and notes which later layers share it."""
        self.seed = seed
        self.init_weights = init_weights
        self.slots = {layer.name: _slots(layer) for layer in layers}
        self.home: dict[int, str] = {}  # of parameters and modules, by id, both kept alive by `slots` and the layers
        self.sharers: dict[str, set[str]] = {layer.name: set() for layer in layers}
        for layer in layers:
            for slot in self.slots[layer.name]:
                self._belongs(slot.meta, layer.name, matters=True)
            for module in layer.module.modules():
                # an initialiser may also write buffers, so a shared module with buffers matters too
                writable = _reset(module) is not None or init_weights is not None
                self._belongs(module, layer.name, matters=writable and any(True for _ in module.buffers(recurse=False)))
        self.blank: set[int] = set()  # ids of the layer's parameters without a value
        self.shared: dict[int, Tensor] = {}  # host values of parameters that a later layer needs again

    def _belongs(self, thing: nn.Parameter | nn.Module, name: str, matters: bool) -> None:
        """Assigns `thing` to layer `name` if it is the first; else notes `name` as a sharer, if `matters`."""
        home = self.home.setdefault(id(thing), name)
        if matters and home != name:
            self.sharers[home].add(name)

    def is_needed_by(self, name: str, owned: Collection[str]) -> bool:
        """Returns whether an owned layer depends on layer `name`, directly or through a layer that must be drawn for it."""
        return any(sharer in owned or self.is_needed_by(sharer, owned) for sharer in self.sharers[name])

    def draw(self, layer: Layer) -> dict[int, Tensor]:
        """Computes the first values of one layer; returns the full host values by id of the meta parameter. Its slots then hold
        real ones.
        """
        slots = self.slots[layer.name]
        own: dict[int, nn.Parameter] = {}
        self.blank.clear()
        for slot in slots:
            key = id(slot.meta)
            if key not in own:
                value = self._first_value(layer, slot)
                own[key] = like(slot.meta, torch.full(slot.meta.shape, torch.nan) if value is None else value)
                if value is None:
                    self.blank.add(id(own[key]))  # NaN until `reset_parameters` or the like writes it
            # Initialisers find the parameter where the module holds it, a tie at each of its places.
            setattr(slot.module, slot.attribute, own[key])
        self._initialise(layer)
        values: dict[int, Tensor] = {}
        for slot in slots:
            key = id(slot.meta)
            if self.home[key] == layer.name:
                values[key] = own[key].data
                # A value that nothing wrote is still NaN.
                _check_written(slot, values[key], is_blank=id(own[key]) in self.blank)
            else:
                values[key] = self.shared[key]  # a tie has the value of the first layer that holds it
        self._keep_shared(layer, values)
        return values

    def _first_value(self, layer: Layer, slot: _Slot) -> Tensor | None:
        """Returns the value from an earlier layer or the factory, on the host; None if there is none. Raises PlanError
        "model-init".
        """
        key = id(slot.meta)
        if self.home[key] != layer.name and key in self.shared:
            return self.shared[key].clone()
        ref = layer.written.get(key)
        if ref is None or is_blank(ref):
            return None
        try:
            return replay([ref])[0].to("cpu")
        except ChangedError:
            why = "the memory that the factory gave it was written again since"
        except Exception as error:
            why = f"what the factory did to it fails when it is done again: {cause(error)}"
        message = f"the first value of the parameter {slot.name!r} cannot be kept: {why}"
        raise PlanError("model-init", message, path=MODEL, hint="give each parameter a tensor of its own")

    def _initialise(self, layer: Layer) -> None:
        """Runs the initialisers of the layer's own modules, innermost first; leaves the host's generators unchanged."""
        if not self.blank and self.init_weights is None:
            return
        done: set[int] = set()
        with seeded(0):  # each module has a seed of its own
            for name, module in _inside_out(layer.module, layer.name, set()):
                if self.home[id(module)] == layer.name:
                    self._initialise_module(module, name, done)

    def _initialise_module(self, module: nn.Module, name: str, done: set[int]) -> None:
        """Runs `reset_parameters` and `init_weights` for one module under the module's own seed.

        done: ids of the parameters that a submodule or another holder has initialised; they keep their values. Adds the
        module's.
        """
        direct = list(module.parameters(recurse=False))
        tied = [(parameter, parameter.clone()) for parameter in direct if id(parameter) in done]
        seed_host(derive(self.seed, "init", name))
        try:
            self._reset(module)
            if self.init_weights is not None:
                self.init_weights(module, name)
        except Exception as error:
            message = f"the module {name!r} ({type(module).__name__}) cannot be initialised: {cause(error)}"
            raise PlanError("model-init", message, path=MODEL) from error
        for parameter, value in tied:
            parameter.copy_(value)
        done.update(id(parameter) for parameter in direct)

    def _reset(self, module: nn.Module) -> None:
        """Runs the module's own initialiser, and restores the parameters that already had a value.

        With `init_weights` it runs for every module, because both draw from one generator and skipping it would shift
        the numbers.
        """
        reset = _reset(module)
        if reset is None or not (self.init_weights or any(id(one) in self.blank for one in module.parameters())):
            return
        kept = [(one, one.clone()) for one in module.parameters() if id(one) not in self.blank]
        reset()
        for parameter, value in kept:
            parameter.copy_(value)

    def _keep_shared(self, layer: Layer, values: dict[int, Tensor]) -> None:
        """Keeps the values of parameters that a later layer holds as well."""
        later = {id(slot.meta) for name in self.sharers[layer.name] for slot in self.slots[name]}
        self.shared.update((key, value) for key, value in values.items() if key in later)


def _fill_held(layer: Layer) -> None:
    """Gives the other tensors that the layer holds their values, on the device where the factory put them.

    The tensor objects stay the same (`swap_tensors`), because code outside the modules refers to them.
    """
    filled = [held for held in layer.held if held.ref is not None and held.tensor.is_meta]
    try:
        values = replay([held.ref for held in filled if held.ref is not None])
        for held, value in zip(filled, values, strict=True):
            tensor = held.tensor
            real = (
                like(tensor, value) if isinstance(tensor, nn.Parameter) else value.requires_grad_(tensor.requires_grad)
            )
            torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]  # torch's
    except Exception as error:
        message = f"the tensors that the layer {layer.name!r} holds, the first at `{filled[0].where}`, have no values: "
        raise PlanError("model-init", message + cause(error), path=MODEL, hint="make them buffers") from error


def _slots(layer: Layer) -> list[_Slot]:
    """Returns every place in the layer that holds a parameter; a tied one has several."""
    return [
        _Slot(module, attribute, f"{name}.{attribute}", parameter)
        for name, module in layer.module.named_modules(prefix=layer.name, remove_duplicate=False)
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _inside_out(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module once with its name: children before their parent, siblings in the order of registration."""
    seen.add(id(module))
    for child_name, child in module.named_children():
        if id(child) not in seen:
            yield from _inside_out(child, f"{name}.{child_name}", seen)
    yield name, module


def _reset(module: nn.Module) -> Callable[[], None] | None:
    """Returns the module's `reset_parameters` or `_reset_parameters`, or None if it has neither."""
    method: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def _check_written(slot: _Slot, value: Tensor, *, is_blank: bool) -> None:
    """Raises PlanError "model-init", with a hint that fits the cause, if `value` contains NaN.

    is_blank: the factory wrote nothing to the parameter, so its module should have.
    """
    if not torch.isnan(value).any():
        return
    kind = type(slot.module).__name__
    message = f"the parameter {slot.name!r} has no first value: "
    if not is_blank:
        message += "what the factory gave it is not a number (NaN), or not all of it was written"
        raise PlanError("model-init", message, path=MODEL, hint="look at where it comes from, and write all of it")
    why = "has no reset_parameters()" if _reset(slot.module) is None else "does not set all of it"
    hint = f"write to it in the factory or in the constructor of {kind}, give {kind} a reset_parameters() that sets it, or "
    hint += "return sley_core.model.layers.Model(layers, init_weights) from the factory"
    raise PlanError("model-init", f"{message}its module ({kind}) {why}", path=MODEL, hint=hint)


def _move_buffers(layer: nn.Module, dtype: torch.dtype, device: torch.device, moved: dict[int, _Moved]) -> None:
    """Moves the layer's buffers to `device`, in their formats beside parameters of `dtype`; shared buffers stay shared.

    moved: (old, new) buffer by id of the old one, across layers; the old one is kept so that its id is not reused.
    """
    for module in layer.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer, buffer.to(device=device, dtype=buffer_format(buffer, dtype))
            setattr(module, name, moved[id(buffer)][1])
