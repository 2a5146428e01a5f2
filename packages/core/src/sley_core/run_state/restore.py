"""Restores a run from a checkpoint: each rank reads its own part of every tensor, whatever ranks wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.attempt import with_kept
from sley_core.engine.save import set_extra_state, with_extra_state
from sley_core.errors import RunError
from sley_core.json_values import from_json
from sley_core.optim.shared import attributes_of, copied, in_training, load, shared_values
from sley_core.plan.loader import Loader
from sley_core.plan.read import read_text
from sley_core.plan.resolve import resolve
from sley_core.run_state.pieces import BUFFERS, OPTIMIZER, WEIGHTS, Region, region_of
from sley_core.run_state.tensors import OPTIONS, SHARED, RunTensors, StateLeaf, joined, state_name
from sley_core.weight_files.write import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sley_core.engine.weights import Stepped
    from sley_core.optim.shared import Shared
    from sley_core.plan.plan import Plan
    from sley_core.run_state.saved import Saved
    from sley_core.weight_files.read import TensorKind


class Restoring:
    """Restores one rank from one checkpoint. is_same_layout: whether ranks and layout are those that wrote the checkpoint."""

    def __init__(self, tensors: RunTensors, saved: Saved, *, is_same_layout: bool) -> None:
        self.tensors = tensors
        self.saved = saved
        self.is_same_layout = is_same_layout
        self.names = frozenset(saved.names)
        self.notes: list[str] = []
        self._states = _by_parameter(saved)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes that this rank needs: weights and buffers."""
        named = {WEIGHTS + param.name: tuple(param.shape) for param in self.tensors.parts.registry}
        return named | {BUFFERS + name: tuple(buffer.shape) for name, buffer, _ in self.tensors.buffers()}

    def mismatches(self) -> Iterator[str]:
        """Yields a text for each name that this rank needs and the checkpoint lacks, or has in another shape."""
        for name, shape in self.expected().items():
            if name not in self.names:
                yield f"{name!r} is not in the checkpoint"
            elif (other := self.saved.kind(name).shape) != shape:
                yield f"{name!r} is {list(other)} in the checkpoint and {list(shape)} here"

    def restore(self) -> None:
        """Sets weights, masters, buffers, optimizer states, and the state of handlers and modules. Does not communicate."""
        self._weights()
        self._buffers()
        self._optimizer()
        self._kept()
        self._extra()

    def _weights(self) -> None:
        """Sets weights and masters from the checkpoint; notes if it has other dtypes."""
        masters = self.tensors.update.masters
        types = set()
        for param in self.tensors.parts.registry:
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
        load(update.optimizer, states, list(map(self._options, names)), _shared(self.saved), update.begun, dtypes)

    def _kept(self) -> None:
        """Restores the state of handlers if the layout is the same; else they start anew, with a note."""
        for place, keeper in self.tensors.keepers.items():
            prefix = self.tensors.own_name(f"{place}/")
            names = [name for name in self.saved.names if name.startswith(prefix)] if self.is_same_layout else []
            keeper.restore_kept({name.removeprefix(prefix): self.saved.tensor(name) for name in names})
            if not self.is_same_layout and any(f"/{place}/" in name for name in self.names):
                self.notes.append(f"{place} begins anew: what it kept belongs to another layout")

    def _extra(self) -> None:
        """Sets the extra states of modules: this rank's own, if the layout is the same, else those of the first rank that has
        them, with a note.
        """
        first = extra_states(self.saved)
        if first and not self.is_same_layout:
            self.notes.append("extra states of modules are those of one rank: the others' belong to another layout")
        for name, module in with_extra_state(self.tensors.parts.layers):
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
            return from_json(self.saved.description.values[name])
        shape = self.saved.kind(name).shape
        is_part = shape == tuple(stepped.param.shape)
        if not is_part:
            return self._own(name, Region(shape))
        return self._own(name, region_of(stepped.param, stepped.span), stepped.parameter)

    def _options(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the counters that the optimizer keeps in the groups of these parameters."""
        values = self.saved.description.values
        options = [values[OPTIONS + name] for name in names if OPTIONS + name in values]
        if any(one != options[0] for one in options):
            raise RunError("checkpoint-mismatch", f"the optimizer had other options for {names[0]!r} and {names[-1]!r}")
        return {key: from_json(value) for key, value in options[0].items()} if options else {}

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


def extra_states(saved: Saved) -> dict[str, str]:
    """Returns, by the name of each extra state, where the first rank that has it keeps it in the checkpoint."""
    places: dict[str, str] = {}
    for place in saved.names:
        head, kind, name = place.partition("/extra/")
        if kind and head.startswith("ranks/"):
            places.setdefault(name, place)
    return places


def load_one(optimizer: torch.optim.Optimizer, saved: Saved, name: str) -> None:
    """Restores the optimizer's state of the parameter `name`, in an optimizer of this parameter alone, whole, on the host."""
    (parameter,) = optimizer.param_groups[0]["params"]
    values = saved.description.values
    every = _by_parameter(saved).get(name, [])
    kept = (StateLeaf(path, from_json(values[one]) if one in values else saved.tensor(one)) for one, path in every)
    options = from_json(values.get(OPTIONS + name, {}))
    dtype, begun = BY_NAME[saved.kind(WEIGHTS + name).dtype], copied(attributes_of(shared_values(optimizer)))
    key = id(parameter)
    load(optimizer, {key: joined(kept)}, [options], _shared(saved), begun, {key: dtype})


def _shared(saved: Saved) -> Shared:
    """Returns the values that the optimizer keeps for all of its parameters together, besides options."""
    every = (from_json(value) for name, value in saved.description.values.items() if name.startswith(SHARED))
    return {tuple(place): value for place, value in every}


def _by_parameter(saved: Saved) -> dict[str, list[tuple[str, tuple[tuple[str, str | int], ...]]]]:
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
    """Gives the weights of the checkpoint `saved` by names of the registry, and its buffers: masters, where there were any. If
    the optimizer of its `plan` has modes, the weights are those after `eval()`.
    """

    def __init__(self, saved: Saved, plan: Plan) -> None:
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
        optimizer: Any = in_training(self._plan.optimizer.build([group], parameter.device))
        load_one(optimizer, self.saved, name)
        optimizer.eval()
        return parameter.detach()


def plan_and_weights(saved: Saved) -> tuple[Plan, SavedWeights]:
    """Returns the resolved plan of the run that wrote the checkpoint `saved`, and its weights.

    The plan names the folder from which its paths start; files that the run has kept take the
    place of those that it names, if the checkpoint lies in the run's folder.
    """
    document = read_text(saved.description.plan, saved.place, Path())
    plan = resolve(with_kept(document, Path(saved.place).parent.parent), Loader())
    return plan, SavedWeights(saved, plan)
