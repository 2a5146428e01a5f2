"""Restores the tensors and small values of a checkpoint into the run of one rank, in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import SequenceKey, tree_leaves, tree_map_with_path

from sley_core import checkpointing
from sley_core.errors import RunError, shorten_names
from sley_core.generators import host_rng_state, set_host_rng_state
from sley_core.json_text import decode_value, encode_value
from sley_core.optim import optimizers
from sley_core.weight_files.write import BY_NAME
from sley_trainer.state_dict import modules_with_extra_state, set_extra_state

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.engine.weights import OptimizerParam
    from sley_trainer.run_state import RunState


def state_region(optimizer_param: OptimizerParam) -> checkpointing.Region:
    """Returns the region of a parameter whose optimizer state this rank holds: all of it on the owner of a matrix."""
    param, elements = optimizer_param.param, optimizer_param.elements
    return checkpointing.Region(param.shape) if optimizer_param.is_owned else checkpointing.Region.from_param(param, elements)


def state_name(parameter: str, state: str) -> str:
    """Returns the checkpoint's name for the optimizer state `state`, such as `exp_avg`, of the parameter `parameter`."""
    return f"{checkpointing.OPTIMIZER}{parameter}/{state}"


def generator_states(device: Device) -> dict[str, Any]:
    """Returns the states of this process's random generators (torch, also on `device`, Python and numpy) as JSON values."""
    torch_state, python_state, numpy_state = host_rng_state()
    states: dict[str, Any] = {"torch": torch_state, "python": python_state}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device.torch_device)
    if numpy_state is not None:
        algorithm, keys, *counters = numpy_state
        states["numpy"] = (algorithm, keys.tolist(), *counters)
    return {name: encode_value(state) for name, state in states.items()}


def restore_generators(states: Mapping[str, Any], device: Device) -> None:
    """Sets this process's random generators to `states`, a result of `generator_states`. Skips generators without a state."""
    values = {name: decode_value(state) for name, state in states.items()}
    numpy_state = None
    if "numpy" in values:
        import numpy

        algorithm, keys, *counters = values["numpy"]
        numpy_state = algorithm, numpy.array(keys, dtype=numpy.uint32), *counters
    set_host_rng_state((values["torch"], values["python"], numpy_state))
    if "cuda" in values and device.type == "cuda":
        torch.cuda.set_rng_state(values["cuda"], device.torch_device)


def encode_state(value: Any, parameter: str, name: str) -> Any:
    """Returns the optimizer's `value` in a form that JSON can encode. Raises RunError "optimizer-state" if this fails."""
    try:
        return encode_value(value)
    except TypeError as error:
        message = f"a checkpoint cannot store {name!r}, which the optimizer keeps for {parameter}: {error}"
        hint = "keep tensors, numbers, strings, and lists, tuples and dicts of them"
        raise RunError("optimizer-state", message, hint=hint) from error


def name_leaves(state: Any) -> Any:
    """Returns a copy of the nested dicts, lists and tuples of `state` with each leaf replaced by its name, such as `momenta.0`.
    Raises RunError "optimizer-state" for a key that is not a string or contains a slash.
    """

    def name(path: Sequence[Any], _: object) -> str:
        keys = [str(entry.idx) if isinstance(entry, SequenceKey) else getattr(entry, "key", entry) for entry in path]
        for key in keys:
            if not isinstance(key, str) or "/" in key:
                raise RunError("optimizer-state", f"the optimizer's state key {key!r} must be a string without a slash")
        return ".".join(keys)

    return tree_map_with_path(name, state)


def state_leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """Returns pairs of the name and the value of each leaf of a nested optimizer state. Raises the errors of `name_leaves`."""
    return zip(tree_leaves(name_leaves(state)), tree_leaves(state), strict=True)


def is_flat(tree: Any) -> bool:
    """Returns whether `tree`, a result of `name_leaves`, is a dict without nested containers, so that its names describe it."""
    return isinstance(tree, dict) and all(isinstance(name, str) for name in tree.values())


class RunRestorer:
    """Restores `state` on this rank from the checkpoint `saved`. is_same_layout: whether the checkpoint has this run's layout.
    names: the names of the checkpoint's tensors. notes: messages for the user.
    """

    def __init__(self, state: RunState, saved: checkpointing.CheckpointReader, *, is_same_layout: bool) -> None:
        self.state = state
        self.saved = saved
        self.is_same_layout = is_same_layout
        self.names = frozenset(saved.names)
        self.notes: list[str] = []
        self._state_names = checkpointing.state_names_by_parameter(saved)

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the full shapes of the weights and buffers that this rank restores, by their names in the checkpoint."""
        saved_params = (param for param in self.state.parts.registry if param.name not in self.state.base_checksums)
        weights = {checkpointing.WEIGHTS + param.name: tuple(param.shape) for param in saved_params}
        return weights | {checkpointing.BUFFERS + name: tuple(buffer.shape) for name, buffer, _ in self.state.buffers()}

    def mismatches(self) -> Iterator[str]:
        """Yields a message for each weight or buffer that the checkpoint lacks or has in a different shape."""
        for name, shape in self.expected_shapes().items():
            if name not in self.names:
                yield f"{name!r} is not in the checkpoint"
            elif (saved_shape := self.saved.info(name).shape) != shape:
                yield f"{name!r} has the shape {list(saved_shape)} in the checkpoint and {list(shape)} here"

    def base_mismatches(self) -> Iterator[str]:
        """Yields the name of each frozen parameter under an adapter if the checkpointed run had different values for it."""
        for name, value in self.state.base_checksums.items():
            if self.saved.description.values.get(checkpointing.BASE + name) != value:
                yield name

    def restore(self) -> None:
        """Restores all tensors and optimizer values of this rank, without communication. Adds notes on states that are lost."""
        self._restore_weights()
        self._restore_averages()
        self._restore_buffers()
        self._restore_optimizer()
        self._add_frozen_note()
        self._restore_stateful_objects()
        self._restore_extra_states()

    def _restore_weights(self) -> None:
        """Restores weights and master weights, except frozen base weights. Adds a note if dtypes are converted."""
        masters = self.state.update.masters
        dtypes = set()
        for param in self.state.parts.registry:
            if param.name in self.state.base_checksums:
                continue
            value = self._read_local(checkpointing.WEIGHTS + param.name, checkpointing.Region.from_param(param))
            dtypes.add(value.dtype)
            masters.set(param, value)
        saved_dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype != masters.dtype)
        if saved_dtypes:
            master_dtype = str(masters.dtype).removeprefix("torch.")
            self.notes.append(f"weights of the checkpoint are {', '.join(saved_dtypes)}, and are converted to {master_dtype}")

    def _restore_averages(self) -> None:
        """Restores the averages of weights. Adds a note if only the checkpoint or only the plan has averages."""
        update, has_averages = self.state.update, any(name.startswith(checkpointing.AVERAGES) for name in self.names)
        if update.averages is None:
            if has_averages:
                self.notes.append("the checkpoint's averages of the weights are dropped, because the plan has no [averaging]")
            return
        update.averages.reset()
        if not has_averages:
            if self.saved.description.step:
                self.notes.append("the checkpoint has no averages of the weights, so they start from its weights")
            return
        update.averages.first_update = self.saved.description.state["averaging"]
        for entry in update.masters.local_params:
            name, parameter = checkpointing.AVERAGES + entry.name, entry.parameter
            if name in self.names:
                average = self._read_local(name, checkpointing.Region.from_param(entry.param, entry.elements), parameter)
                update.averages.tensors[parameter] = average.to(parameter.device, parameter.dtype)

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        """Restores buffers. A per-rank buffer gets this rank's value if the layout is the same, else the common value."""
        for name, buffer, is_per_rank in self.state.buffers():
            rank_name = self.state.rank_name(checkpointing.BUFFERS + name)
            has_rank_value = is_per_rank and self.is_same_layout and rank_name in self.names
            buffer.copy_(
                self._read_local(
                    rank_name if has_rank_value else checkpointing.BUFFERS + name, checkpointing.Region(tuple(buffer.shape))
                )
            )

    def _restore_optimizer(self) -> None:
        """Restores the states, options and shared values of the optimizer for the parameters that this rank updates."""
        update = self.state.update
        params_by_id = {id(entry.parameter): entry for entry in update.masters.optimizer_params}
        states = {key: self._read_state(entry) for key, entry in params_by_id.items()}
        names = [[params_by_id[id(param)].name for param in group["params"]] for group in update.optimizer.param_groups]
        dtypes = {
            key: BY_NAME[self.saved.info(checkpointing.WEIGHTS + entry.name).dtype] for key, entry in params_by_id.items()
        }
        optimizers.load_optimizer_state(
            update.optimizer,
            states,
            list(map(self._read_options, names)),
            checkpointing.shared_states(self.saved),
            update.initial_values,
            dtypes,
        )

    def _add_frozen_note(self) -> None:
        """Adds a note if the checkpoint has more than the weight for a parameter that this run's optimizer does not have."""
        masters = self.state.update.masters
        known = {entry.name for entry in masters.local_params}
        lost = []
        for param in self.state.parts.registry:
            name = param.name
            if name in known or param.trainable or name in self.state.base_checksums:
                continue
            saved_dtype = BY_NAME[self.saved.info(checkpointing.WEIGHTS + name).dtype]
            is_rounded = saved_dtype == masters.dtype != param.parameter.dtype
            if is_rounded or name in self._state_names or checkpointing.AVERAGES + name in self.names:
                lost.append(name)
        if lost:
            message = "these parameters are frozen, so their optimizer states, averages and masters are dropped"
            hint = "to keep them, unfreeze the parameters before you load the checkpoint"
            self.notes.append(f"{message}: {shorten_names(lost)}; {hint}")

    def _restore_stateful_objects(self) -> None:
        """Restores the states of plugins' objects on this rank. If the layout has changed, resets them and adds a note."""
        for path, stateful_object in self.state.stateful_objects.items():
            prefix = self.state.rank_name(f"{path}/")
            names = [name for name in self.saved.names if name.startswith(prefix)] if self.is_same_layout else []
            stateful_object.restore_saved_state({name.removeprefix(prefix): self.saved.tensor(name) for name in names})
            if not self.is_same_layout and any(f"/{path}/" in name for name in self.names):
                self.notes.append(f"the state of {path} is reset, because the checkpoint has a different layout")

    def _restore_extra_states(self) -> None:
        """Restores the extra state of each module: this rank's state if the layout is the same, else the state of one rank."""
        saved_names = checkpointing.extra_state_names(self.saved)
        if saved_names and not self.is_same_layout:
            self.notes.append("each module gets the extra state of one rank, because the checkpoint has a different layout")
        for name, module in modules_with_extra_state(self.state.parts.layers):
            rank_name = self.state.rank_name(f"extra/{name}")
            if name not in saved_names:
                raise RunError("checkpoint-mismatch", f"{name!r} is not in the checkpoint")
            set_extra_state(module, self.saved.tensor(rank_name if self.is_same_layout else saved_names[name]))

    def _read_state(self, optimizer_param: OptimizerParam) -> Any:
        """Returns the saved state of the optimizer for this rank's part of a parameter, with its nested containers."""
        names = self._state_names.get(optimizer_param.name, {})
        leaves = {leaf: self._read_leaf(optimizer_param, name) for leaf, name in names.items()}
        return checkpointing.join_leaves(decode_value(self.saved.description.trees.get(optimizer_param.name)), leaves)

    def _read_leaf(self, optimizer_param: OptimizerParam, name: str) -> Any:
        """Returns the saved value `name` of the optimizer, or this rank's part of it if it has the shape of the parameter."""
        if name in self.saved.description.values:
            return decode_value(self.saved.description.values[name])
        shape = self.saved.info(name).shape
        if shape != tuple(optimizer_param.param.shape):
            return self._read_local(name, checkpointing.Region(shape))
        return self._read_local(name, state_region(optimizer_param), optimizer_param.parameter)

    def _read_options(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the saved options of the group with the parameters `names`. Raises RunError if their options differ."""
        values = self.saved.description.values
        options = [values[checkpointing.OPTIONS + name] for name in names if checkpointing.OPTIONS + name in values]
        if any(group_options != options[0] for group_options in options):
            raise RunError("checkpoint-mismatch", f"the optimizer had different options for {names[0]!r} and {names[-1]!r}")
        return {key: decode_value(value) for key, value in options[0].items()} if options else {}

    def _read_local(self, name: str, region: checkpointing.Region, like: torch.Tensor | None = None) -> torch.Tensor:
        """Returns this rank's part (`region`) of a saved tensor, on the host, in the saved dtype, padded with zeros. The result
        has the strides of `like`, since fused optimizers process a parameter and its states in memory order.
        """
        dtype = BY_NAME[self.saved.info(name).dtype]
        if like is None:
            local = torch.zeros(region.local_shape, dtype=dtype)
        else:
            local = torch.zeros_like(like, dtype=dtype, device="cpu", requires_grad=False)
        for rectangle, view in region.split(local):
            self.saved.read_into(name, rectangle, view)
        return local
