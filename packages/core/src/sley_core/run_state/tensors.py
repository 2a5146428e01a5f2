"""The contents of a checkpoint: this rank's tensors by names that no layout changes, and small values.

weights/<parameter>              the master if there is one, else the weight
optimizer/<parameter>/<state>    under the optimizer's own key
buffers/<name>                   of modules: persistent ones, and those that may differ from rank to rank
ranks/<rank>/<name>              of one rank alone
ranks/<rank>/extra/<name>        extra states of its modules
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sley_core.engine.save import extra_state, with_extra_state
from sley_core.errors import RunError
from sley_core.generators import host_state, set_host_state
from sley_core.json_values import from_json, to_json
from sley_core.optim.shared import options_to_save, shared_to_save
from sley_core.run_state.pieces import BUFFERS, OPTIMIZER, WEIGHTS, Region, TensorPiece, region_of
from sley_core.weight_files.write import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sley_core.comm.device import Device
    from sley_core.engine.parts import Parts
    from sley_core.engine.update import Update
    from sley_core.engine.weights import Stepped
    from sley_core.memory.run_memory import RunMemory
    from sley_core.protocols import Keeps

OPTIONS = "options/"
"""How the names of values begin that are a parameter's options in the optimizer's groups."""

SHARED = "shared/"
"""How the names of values begin that the optimizer keeps for all of its parameters: states under other keys, attributes."""


class RunTensors:
    """Collects the tensors of one rank. per_rank: patterns of buffers that may differ from rank to rank. keepers: objects that
    keep tensors of their own, by their place in the plan.
    """

    def __init__(
        self, parts: Parts, update: Update, memory: RunMemory, per_rank: Sequence[str], keepers: Mapping[str, Keeps]
    ) -> None:
        self.parts = parts
        self.update = update
        self.memory = memory
        self.per_rank = tuple(per_rank)
        self.keepers = keepers

    def pieces(self) -> list[TensorPiece]:
        """Returns all tensors of this rank, which are live memory, with their places; equal pieces of ranks have the same bits.

        Raises RunError `checkpoint-type` for a dtype that a file cannot hold.
        """
        self.memory.follow("a checkpoint")
        self._at_rest = self.memory.at_rest()
        pieces = [*self._weights(), *self._states(), *self._all_buffers(), *self._kept()]
        for piece in pieces:
            if piece.tensor.dtype not in DTYPES or piece.tensor.layout is not torch.strided:
                kind = f"{piece.tensor.dtype}, {piece.tensor.layout}"
                raise RunError("checkpoint-type", f"a checkpoint cannot have {piece.name!r}, which is {kind}")
        return pieces

    def values(self) -> dict[str, Any]:
        """Returns, as JSON, the optimizer's values that are no tensors: leaves of states, and counters in its groups."""
        values = {}
        for stepped in self.update.masters.stepped:
            for leaf in leaves(self.update.optimizer.state.get(stepped.parameter, {})):
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
        paths = {}
        for stepped in self.update.masters.stepped:
            for leaf in leaves(self.update.optimizer.state.get(stepped.parameter, {})):
                if len(leaf.path) > 1:
                    paths[state_name(stepped.name, leaf.name)] = [list(one) for one in leaf.path]
        return paths

    def buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yields name and value of each saved buffer, and whether it may differ from rank to rank."""
        for layer in self.parts.layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name):
                for attribute, buffer in module.named_buffers(recurse=False):
                    name = f"{prefix}.{attribute}"
                    differs = any(fnmatchcase(name, pattern) for pattern in self.per_rank)
                    if differs or attribute not in module._non_persistent_buffers_set:
                        yield name, buffer, differs

    def _weights(self) -> Iterator[TensorPiece]:
        """Yields the pieces of weights that this rank saves: masters of what it steps, and whole weights that no rank has
        cut, or that have no elements to cut.
        """
        stepped = {one.param: one for one in self.update.masters.stepped}
        for param in self.parts.registry:
            if param in stepped:
                one = stepped[param]
                yield from self._cut(WEIGHTS + param.name, region_of(param, one.span), one.parameter)
            elif self.parts.store.span(param) is None or 0 in param.shape:
                yield from self._cut(WEIGHTS + param.name, region_of(param), param.parameter)

    def _states(self) -> Iterator[TensorPiece]:
        """Yields the pieces of optimizer states that this rank saves."""
        for stepped in self.update.masters.stepped:
            for leaf in leaves(self.update.optimizer.state.get(stepped.parameter, {})):
                if isinstance(leaf.value, Tensor):
                    name = state_name(stepped.name, leaf.name)
                    yield from self._cut(name, state_region(stepped, tuple(leaf.value.shape)), leaf.value)

    def _all_buffers(self) -> Iterator[TensorPiece]:
        """Yields the pieces of buffers; one that differs per rank is saved under this rank's own name, too."""
        for name, buffer, differs in self.buffers():
            yield from self._cut(BUFFERS + name, Region(tuple(buffer.shape)), buffer)
            if differs:
                yield from self._cut(self.own_name(BUFFERS + name), Region(tuple(buffer.shape)), buffer)

    def _kept(self) -> Iterator[TensorPiece]:
        kept = {place: keeper.kept() for place, keeper in self.keepers.items()}
        kept["extra"] = {name: extra_state(name, module) for name, module in with_extra_state(self.parts.layers)}
        for place, tensors in kept.items():
            for name, tensor in tensors.items():
                yield from self._cut(self.own_name(f"{place}/{name}"), Region(tuple(tensor.shape)), tensor)

    def own_name(self, name: str) -> str:
        """Returns the name in the checkpoint of a tensor of this rank alone."""
        return f"ranks/{self.parts.world.rank}/{name}"

    def _cut(self, name: str, region: Region, tensor: Tensor) -> Iterator[TensorPiece]:
        for rectangle, view in region.cut(self._at_rest(tensor.detach())):
            yield TensorPiece(name, region.shape, rectangle, view)


def state_name(parameter: str, state: str) -> str:
    """Returns the name of a state of a parameter."""
    return f"{OPTIMIZER}{parameter}/{state}"


def state_region(stepped: Stepped, shape: tuple[int, ...]) -> Region:
    """Returns this rank's region of a state: that of the parameter, if the state has the parameter's shape; else all of it."""
    return region_of(stepped.param, stepped.span) if shape == tuple(stepped.parameter.shape) else Region(shape)


def generators(device: Device) -> dict[str, Any]:
    """Returns the states of this process's generators, as JSON: torch's, Python's and numpy's."""
    of_torch, of_python, of_numpy = host_state()
    found: dict[str, Any] = {"torch": of_torch, "python": of_python}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device.torch_device)
    if of_numpy is not None:
        kind, keys, *rest = of_numpy
        found["numpy"] = (kind, keys.tolist(), *rest)
    return {name: to_json(state) for name, state in found.items()}


def restore_generators(states: Mapping[str, Any], device: Device) -> None:
    """Restores what `generators` returned."""
    found = {name: from_json(state) for name, state in states.items()}
    of_numpy = None
    if "numpy" in found:
        import numpy

        kind, keys, *rest = found["numpy"]
        of_numpy = kind, numpy.array(keys, dtype=numpy.uint32), *rest
    set_host_state((found["torch"], found["python"], of_numpy))
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device.torch_device)


def _plain(value: Any, parameter: str, name: str) -> Any:
    try:
        return to_json(value)
    except TypeError as error:
        raise RunError(
            "optimizer-state",
            f"a checkpoint cannot have {name!r}, which the optimizer keeps for {parameter}: {error}",
            hint="keep tensors, numbers, strings, and lists, tuples and dicts of them",
        ) from error


class StateLeaf(NamedTuple):
    """Holds a value in a state. path: the containers that lead to it, each as its kind and the key or index in it."""

    path: tuple[tuple[str, str | int], ...]
    value: Any

    @property
    def name(self) -> str:
        return ".".join(str(key) for _, key in self.path)


def leaves(state: Any, path: tuple[tuple[str, str | int], ...] = ()) -> Iterator[StateLeaf]:
    """Yields the values in dicts, lists and tuples. Raises RunError `optimizer-state` for a key that cannot be part of a
    name.
    """
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
