"""The contents of a checkpoint: this rank's tensors by names that no layout changes, and small values.

weights/<parameter>              the master if there is one, else the weight
optimizer/<parameter>/<state>    under the optimizer's own key
buffers/<name>                   of modules: persistent ones, and those that may differ from rank to rank
ranks/<rank>/<name>              of one rank alone
ranks/<rank>/extra/<name>        extra states of its modules
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from sley_core.attempt import use_copied_files
from sley_core.engine.save import extra_state, modules_with_extra_state, set_extra_state
from sley_core.errors import RunError
from sley_core.generators import host_state, set_host_state
from sley_core.json_text import decode_value, encode_value
from sley_core.optim.shared import (
    Shared,
    attributes_of,
    copy_values,
    load_optimizer_state,
    options_to_save,
    set_training_mode,
    shared_to_save,
    shared_values,
)
from sley_core.plan.load import resolve_plan
from sley_core.plan.loader import Loader
from sley_core.plan.read import read_text
from sley_core.run_state.pieces import BUFFERS, OPTIMIZER, WEIGHTS, CheckpointReader, Region, TensorPiece, region_of
from sley_core.weight_files.write import BY_NAME, DTYPES

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.engine.parts import Parts
    from sley_core.engine.update import Update
    from sley_core.engine.weights import Stepped
    from sley_core.memory.run_memory import RunMemory
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Stateful
    from sley_core.weight_files.read import TensorKind

OPTIONS = "options/"
"""How the names of values begin that are a parameter's options in the optimizer's groups."""

BASE = "base/"
"""How the names of values begin that are checksums of the frozen parameters of a model with adapters."""

SHARED = "shared/"
"""How the names of values begin that the optimizer keeps for all of its parameters: states under other keys, attributes."""


class RunTensors:
    """Collects the tensors of one rank. per_rank: patterns of buffers that may differ. keepers: by their place in the plan."""

    def __init__(
        self, parts: Parts, update: Update, memory: RunMemory, per_rank: Sequence[str], keepers: Mapping[str, Stateful]
    ) -> None:
        self.parts = parts
        self.update = update
        self.memory = memory
        self.per_rank = tuple(per_rank)
        self.keepers = keepers

    def pieces(self) -> list[TensorPiece]:
        """Returns all tensors of this rank, live memory, with their places. Raises RunError `checkpoint-type`."""
        self.memory.follow("a checkpoint")
        at_rest = self.memory.at_rest()
        pieces = [
            TensorPiece(name, region.shape, rectangle, view)
            for name, region, tensor in self._own_tensors()
            for rectangle, view in region.cut(at_rest(tensor.detach()))
        ]
        for piece in pieces:
            if piece.tensor.dtype not in DTYPES or piece.tensor.layout is not torch.strided:
                kind = f"{piece.tensor.dtype}, {piece.tensor.layout}"
                raise RunError("checkpoint-type", f"a checkpoint cannot have {piece.name!r}, which is {kind}")
        return pieces

    def _own_tensors(self) -> Iterator[tuple[str, Region, Tensor]]:
        """Yields this rank's tensors, each with its name in the checkpoint and its place in the whole one."""
        masters = {one.param: one for one in self.update.masters.stepped}
        for param in self.parts.registry:
            if param.name in self.base:
                continue  # a run that resumes reads or draws it again
            if param in masters:
                yield WEIGHTS + param.name, region_of(param, masters[param].elements), masters[param].parameter
            elif self.parts.store.elements(param) is None or 0 in param.shape:  # whole, or without an element to cut
                yield WEIGHTS + param.name, region_of(param), param.parameter
        for stepped, leaf in self._state_leaves():
            if isinstance(leaf.value, Tensor):
                shape = tuple(leaf.value.shape)  # of the parameter, or of something else
                is_cut = shape == tuple(stepped.parameter.shape)
                region = region_of(stepped.param, stepped.elements) if is_cut else Region(shape)
                yield state_name(stepped.name, leaf.name), region, leaf.value
        for name, buffer, differs in self.buffers():
            for place in (BUFFERS + name, *([self.own_name(BUFFERS + name)] if differs else [])):
                yield place, Region(tuple(buffer.shape)), buffer
        kept = {place: keeper.saved_state() for place, keeper in self.keepers.items()}
        kept["extra"] = {name: extra_state(name, module) for name, module in modules_with_extra_state(self.parts.layers)}
        for place, tensors in kept.items():
            for name, tensor in tensors.items():
                yield self.own_name(f"{place}/{name}"), Region(tuple(tensor.shape)), tensor

    @property
    def base(self) -> Mapping[str, int]:
        """The checksums of the frozen parameters of a model with adapters, by name; a checkpoint has nothing else of them."""
        return self.parts.registry.base

    def _state_leaves(self) -> Iterator[tuple[Stepped, StateLeaf]]:
        for stepped in self.update.masters.stepped:
            for leaf in leaves(self.update.optimizer.state.get(stepped.parameter, {})):
                yield stepped, leaf

    def values(self) -> dict[str, Any]:
        """Returns, as JSON, the optimizer's values that are no tensors: leaves of states, and counters in its groups."""
        values = {}
        for stepped, leaf in self._state_leaves():
            if leaf.path and not isinstance(leaf.value, Tensor):
                values[state_name(stepped.name, leaf.name)] = _plain(leaf.value, stepped.name, leaf.name)
        names = {id(stepped.parameter): stepped.name for stepped in self.update.masters.stepped}
        for group in self.update.optimizer.param_groups:
            options = options_to_save(self.update.optimizer, group)
            if changed := {key: _plain(value, "a group", key) for key, value in options.items()}:
                values |= {OPTIONS + names[id(one)]: changed for one in group["params"] if id(one) in names}
        for place, value in shared_to_save(self.update.optimizer, self.update.begun).items():
            where = ".".join(map(str, place[1:]))
            values[f"{SHARED}{place[0]}/{where}"] = _plain([list(place), value], "all parameters", where)
        return values

    def paths(self) -> dict[str, Any]:
        """Returns the paths of the leaves of nested states; {} for an optimizer whose states are flat."""
        return {
            state_name(stepped.name, leaf.name): [list(one) for one in leaf.path]
            for stepped, leaf in self._state_leaves()
            if len(leaf.path) > 1
        }

    def buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yields name and value of each saved buffer, and whether it may differ from rank to rank."""
        for layer in self.parts.layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name):
                for attribute, buffer in module.named_buffers(recurse=False):
                    name = f"{prefix}.{attribute}"
                    differs = any(fnmatchcase(name, pattern) for pattern in self.per_rank)
                    if differs or attribute not in module._non_persistent_buffers_set:
                        yield name, buffer, differs

    def own_name(self, name: str) -> str:
        """Returns the name in the checkpoint of a tensor of this rank alone."""
        return f"ranks/{self.parts.world.rank}/{name}"


def state_name(parameter: str, state: str) -> str:
    return f"{OPTIMIZER}{parameter}/{state}"


def generators(device: Device) -> dict[str, Any]:
    """Returns the states of this process's generators, as JSON: torch's, Python's and numpy's."""
    of_torch, of_python, of_numpy = host_state()
    states: dict[str, Any] = {"torch": of_torch, "python": of_python}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device.torch_device)
    if of_numpy is not None:
        kind, keys, *rest = of_numpy
        states["numpy"] = (kind, keys.tolist(), *rest)
    return {name: encode_value(state) for name, state in states.items()}


def restore_generators(states: Mapping[str, Any], device: Device) -> None:
    values = {name: decode_value(state) for name, state in states.items()}
    of_numpy = None
    if "numpy" in values:
        import numpy

        kind, keys, *rest = values["numpy"]
        of_numpy = kind, numpy.array(keys, dtype=numpy.uint32), *rest
    set_host_state((values["torch"], values["python"], of_numpy))
    if "cuda" in values and device.type == "cuda":
        torch.cuda.set_rng_state(values["cuda"], device.torch_device)


def _plain(value: Any, parameter: str, name: str) -> Any:
    try:
        return encode_value(value)
    except TypeError as error:
        message = f"a checkpoint cannot have {name!r}, which the optimizer keeps for {parameter}: {error}"
        hint = "keep tensors, numbers, strings, and lists, tuples and dicts of them"
        raise RunError("optimizer-state", message, hint=hint) from error


class StateLeaf(NamedTuple):
    """A value in a state. path: the containers that lead to it, each as its kind and the key or index in it."""

    path: tuple[tuple[str, str | int], ...]
    value: Any

    @property
    def name(self) -> str:
        return ".".join(str(key) for _, key in self.path)


def leaves(state: Any, path: tuple[tuple[str, str | int], ...] = ()) -> Iterator[StateLeaf]:
    """Yields the values in dicts, lists and tuples. Raises RunError `optimizer-state` for a key that no name can have."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if not isinstance(key, str) or "/" in key:
                raise RunError("optimizer-state", f"the optimizer's states have the key {key!r}, which cannot be a name")
            yield from leaves(value, (*path, ("dict", key)))
    elif type(state) in (list, tuple) and state:
        for number, value in enumerate(state):
            yield from leaves(value, (*path, (type(state).__name__, number)))
    else:
        yield StateLeaf(path, state)


def joined(every: Iterable[StateLeaf]) -> Any:
    """Rebuilds the state from its leaves, in their order."""
    root: dict[str | int, Any] = {}
    kinds: dict[tuple[str | int, ...], str] = {}
    for path, value in every:
        inside = root
        for depth, (kind, key) in enumerate(path):
            kinds[tuple(one for _, one in path[:depth])] = kind
            if depth == len(path) - 1:
                inside[key] = value
            else:
                inside = inside.setdefault(key, {})
    return _built(root, (), kinds)


def _built(node: Any, place: tuple[str | int, ...], kinds: Mapping[tuple[str | int, ...], str]) -> Any:
    """Returns `node` with dicts turned back into lists and tuples where `kinds` says so. place: the path of `node`."""
    if place not in kinds:
        return node if place else {}
    inside = {key: _built(value, (*place, key), kinds) for key, value in node.items()}
    if kinds[place] == "dict":
        return inside
    every = [inside[number] for number in sorted(inside)]
    return tuple(every) if kinds[place] == "tuple" else every


class Restoring:
    """Restores one rank from one checkpoint. is_same_layout: whether ranks and layout are those that wrote the checkpoint."""

    def __init__(self, tensors: RunTensors, saved: CheckpointReader, *, is_same_layout: bool) -> None:
        self.tensors = tensors
        self.saved = saved
        self.is_same_layout = is_same_layout
        self.names = frozenset(saved.names)
        self.notes: list[str] = []
        self._states = _by_parameter(saved)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes that this rank needs: weights and buffers."""
        saved = (param for param in self.tensors.parts.registry if param.name not in self.tensors.base)
        named = {WEIGHTS + param.name: tuple(param.shape) for param in saved}
        return named | {BUFFERS + name: tuple(buffer.shape) for name, buffer, _ in self.tensors.buffers()}

    def mismatches(self) -> Iterator[str]:
        """Yields a text for each name that this rank needs and the checkpoint lacks, or has in another shape."""
        for name, shape in self.expected().items():
            if name not in self.names:
                yield f"{name!r} is not in the checkpoint"
            elif (other := self.saved.kind(name).shape) != shape:
                yield f"{name!r} is {list(other)} in the checkpoint and {list(shape)} here"

    def base_mismatches(self) -> Iterator[str]:
        """Yields the name of each frozen parameter of the base whose values are not those of the checkpoint's run."""
        for name, value in self.tensors.base.items():
            if self.saved.description.values.get(BASE + name) != value:
                yield name

    def restore(self) -> None:
        """Sets weights, masters, buffers, optimizer states, and the state of handlers and modules. Does not communicate."""
        self._weights()
        self._buffers()
        self._optimizer()
        self._keepers()
        self._extra()

    def _weights(self) -> None:
        """Sets weights and masters from the checkpoint; notes if it has other dtypes."""
        masters = self.tensors.update.masters
        types = set()
        for param in self.tensors.parts.registry:
            if param.name in self.tensors.base:
                continue
            value = self._own(WEIGHTS + param.name, region_of(param))
            types.add(value.dtype)
            masters.set(param, value)
        others = sorted(str(one).removeprefix("torch.") for one in types if one != masters.wide)
        if others:
            wide = str(masters.wide).removeprefix("torch.")
            self.notes.append(f"weights of the checkpoint were {', '.join(others)}, and are {wide} here")

    @torch.no_grad()
    def _buffers(self) -> None:
        """Sets buffers: this rank's own value of one that differs per rank, if the layout is the same, else the common one."""
        for name, buffer, differs in self.tensors.buffers():
            own = self.tensors.own_name(BUFFERS + name)
            is_own = differs and self.is_same_layout and own in self.names
            buffer.copy_(self._own(own if is_own else BUFFERS + name, Region(tuple(buffer.shape))))

    def _optimizer(self) -> None:
        """Restores the optimizer's states through its own `load_state_dict`, which knows their device and dtype."""
        update = self.tensors.update
        stepped = {id(one.parameter): one for one in update.masters.stepped}
        states = {key: self._state(one) for key, one in stepped.items()}
        names = [[stepped[id(one)].name for one in group["params"]] for group in update.optimizer.param_groups]
        dtypes = {key: BY_NAME[self.saved.kind(WEIGHTS + one.name).dtype] for key, one in stepped.items()}
        load_optimizer_state(
            update.optimizer, states, list(map(self._options, names)), _shared(self.saved), update.begun, dtypes
        )

    def _keepers(self) -> None:
        """Restores the state of handlers if the layout is the same; else they begin anew, with a note."""
        for place, keeper in self.tensors.keepers.items():
            prefix = self.tensors.own_name(f"{place}/")
            names = [name for name in self.saved.names if name.startswith(prefix)] if self.is_same_layout else []
            keeper.restore_saved_state({name.removeprefix(prefix): self.saved.tensor(name) for name in names})
            if not self.is_same_layout and any(f"/{place}/" in name for name in self.names):
                self.notes.append(f"{place} begins allow_fresh_start: what it kept belongs to another layout")

    def _extra(self) -> None:
        """Sets extra states of modules: this rank's own in the same layout, else those of the first rank, with a note."""
        first = extra_states(self.saved)
        if first and not self.is_same_layout:
            self.notes.append("extra states of modules are those of one rank: the others' belong to another layout")
        for name, module in modules_with_extra_state(self.tensors.parts.layers):
            own = self.tensors.own_name(f"extra/{name}")
            if name not in first:
                raise RunError("checkpoint-mismatch", f"{name!r} is not in the checkpoint")
            set_extra_state(module, self.saved.tensor(own if self.is_same_layout else first[name]))

    def _state(self, stepped: Stepped) -> Any:
        named = self._states.get(stepped.name, [])
        return joined(StateLeaf(path, self._leaf(stepped, name)) for name, path in named)

    def _leaf(self, stepped: Stepped, name: str) -> Any:
        """Reads one state leaf of `stepped` from the checkpoint: a plain value, a whole tensor, or this rank's part of one."""
        if name in self.saved.description.values:
            return decode_value(self.saved.description.values[name])
        shape = self.saved.kind(name).shape
        is_part = shape == tuple(stepped.param.shape)
        if not is_part:
            return self._own(name, Region(shape))
        return self._own(name, region_of(stepped.param, stepped.elements), stepped.parameter)

    def _options(self, names: Sequence[str]) -> dict[str, Any]:
        values = self.saved.description.values
        options = [values[OPTIONS + name] for name in names if OPTIONS + name in values]
        if any(one != options[0] for one in options):
            raise RunError("checkpoint-mismatch", f"the optimizer had other options for {names[0]!r} and {names[-1]!r}")
        return {key: decode_value(value) for key, value in options[0].items()} if options else {}

    def _own(self, name: str, region: Region, like: Tensor | None = None) -> Tensor:
        """Returns this rank's part of a tensor, on the host, in the format of the file, padded with zeros.

        like: gives the strides; fused optimizers go through a parameter and its states in the order of memory.
        """
        dtype = BY_NAME[self.saved.kind(name).dtype]
        if like is None:
            own = torch.zeros(region.own_shape, dtype=dtype)
        else:
            own = torch.zeros_like(like, dtype=dtype, device="cpu", requires_grad=False)
        for rectangle, view in region.cut(own):
            self.saved.read_into(name, rectangle, view)
        return own


def extra_states(saved: CheckpointReader) -> dict[str, str]:
    """Returns, by the name of each extra state, where the first rank that has it keeps it in the checkpoint."""
    places: dict[str, str] = {}
    for place in saved.names:
        head, kind, name = place.partition("/extra/")
        if kind and head.startswith("ranks/"):
            places.setdefault(name, place)
    return places


def load_one(optimizer: torch.optim.Optimizer, saved: CheckpointReader, name: str) -> None:
    """Restores the optimizer's state of the parameter `name`, in an optimizer of this parameter alone, whole, on the host."""
    (parameter,) = optimizer.param_groups[0]["params"]
    values = saved.description.values
    every = _by_parameter(saved).get(name, [])
    state_leaves = (StateLeaf(path, decode_value(values[one]) if one in values else saved.tensor(one)) for one, path in every)
    options = decode_value(values.get(OPTIONS + name, {}))
    dtype, begun = BY_NAME[saved.kind(WEIGHTS + name).dtype], copy_values(attributes_of(shared_values(optimizer)))
    key = id(parameter)
    load_optimizer_state(optimizer, {key: joined(state_leaves)}, [options], _shared(saved), begun, {key: dtype})


def _shared(saved: CheckpointReader) -> Shared:
    """Returns the values that the optimizer keeps for all of its parameters together, besides options."""
    every = (decode_value(value) for name, value in saved.description.values.items() if name.startswith(SHARED))
    return {tuple(place): value for place, value in every}


def _by_parameter(saved: CheckpointReader) -> dict[str, list[tuple[str, tuple[tuple[str, str | int], ...]]]]:
    """Returns, by parameter, the names of its states in the checkpoint, each with its path; tensors and values."""
    states: dict[str, list[tuple[str, tuple[tuple[str, str | int], ...]]]] = {}
    for name in [*saved.names, *saved.description.values]:
        if name.startswith(OPTIMIZER):
            parameter, _, state = name.removeprefix(OPTIMIZER).rpartition("/")
            path = saved.description.paths.get(name, [["dict", state]])
            assert name == state_name(parameter, state), name
            states.setdefault(parameter, []).append((name, tuple((kind, key) for kind, key in path)))
    return states


class SavedWeights:
    """The weights of the checkpoint `saved` by names of the registry, and its buffers: masters, and after `eval()`."""

    def __init__(self, saved: CheckpointReader, plan: Plan) -> None:
        self.saved = saved
        self._plan = plan
        self._origin = extra_states(saved) | {
            name.removeprefix(kind): name for kind in (WEIGHTS, BUFFERS) for name in saved.names if name.startswith(kind)
        }

    @property
    def names(self) -> Sequence[str]:
        return list(self._origin)

    def kind(self, name: str) -> TensorKind:
        return self.saved.kind(self._origin[name])

    def tensor(self, name: str) -> Tensor:
        value = self.saved.tensor(self._origin[name])
        if not self.saved.description.state["has_modes"] or not self._origin[name].startswith(WEIGHTS):
            return value
        parameter = nn.Parameter(value)
        config: Any = self._plan.optimizer.config
        group = {"params": [parameter], "lr": config.lr, "initial_lr": config.lr, "weight_decay": config.weight_decay}
        optimizer: Any = set_training_mode(self._plan.optimizer.build([group], parameter.device))
        load_one(optimizer, self.saved, name)
        optimizer.eval()
        return parameter.detach()


def plan_and_weights(saved: CheckpointReader) -> tuple[Plan, SavedWeights]:
    """Returns the resolved plan of the run that wrote the checkpoint `saved`, and its weights. Copies of files in the run's
    folder take the place of those that the plan names, if the checkpoint lies in that folder.
    """
    document = read_text(saved.description.plan, saved.place, Path())
    plan = resolve_plan(use_copied_files(document, Path(saved.place).parent.parent), Loader())
    return plan, SavedWeights(saved, plan)
