"""Reads the weights in checkpoints and run folders without a run, for exports, samples and later runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sley_core.attempt import use_copied_files
from sley_core.checkpointing import AVERAGES, BUFFERS, OPTIMIZER, WEIGHTS, CheckpointReader
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.errors import RunError
from sley_core.files import PLAN
from sley_core.files import WEIGHTS as WEIGHTS_FOLDER
from sley_core.json_text import decode_value
from sley_core.model.build import build_on_meta
from sley_core.model.tensors import checksum
from sley_core.model.values import HostModel
from sley_core.optim import shared
from sley_core.plan.document import read_file, read_text
from sley_core.plan.kinds import CHECKPOINTER
from sley_core.plan.load import resolve_plan
from sley_core.plan.loader import Loader
from sley_core.plan.plan import Plan
from sley_core.protocols import CheckpointFiles
from sley_core.records import CheckpointerRecord
from sley_core.weight_files.read import TensorKind, TensorReader, WeightFiles, weight_files_error
from sley_core.weight_files.write import BY_NAME, DTYPES

OPTIONS = "options/"
"""The name prefix of a parameter's options in the optimizer's groups."""

BASE = "base/"
"""The name prefix of the checksum of a frozen parameter, in checkpoints of a model with adapters."""

SHARED = "shared/"
"""The name prefix of values that the optimizer keeps for all parameters, such as attributes."""


def checkpoint_files(loader: Loader, plan: Plan | None = None) -> CheckpointFiles | None:
    """Returns the `CheckpointFiles` of the plan's checkpointer, or None if the checkpointer has no such class.

    If `plan` is None or has no table `[checkpoint]`, uses the default checkpointer. Raises PluginError "plugin-missing" if it
    is not installed.
    """
    if plan is not None and plan.checkpoint is not None:
        record = plan.checkpoint.record
    else:
        record = loader.record(CheckpointerRecord, CHECKPOINTER)
    assert isinstance(record, CheckpointerRecord), record
    if record.files is None:
        return None
    files: CheckpointFiles = record.load(record.files)()
    return files


def open_run_weights(path: Path, run: Path) -> TensorReader:
    """Returns a reader of the final weights in the run folder `run` if `path` equals it, or else of the weights in the
    checkpoint `path`. Adapters are merged into the weights.

    Raises RunError "weight-files" if there is no checkpoint in `path`.
    """
    plan = resolve_plan(use_copied_files(read_file(run / PLAN), run), Loader())
    source: TensorReader
    if path == run:
        source = WeightFiles(run / WEIGHTS_FOLDER)
    else:
        files = checkpoint_files(plan.loader, plan)
        checkpoint = None if files is None else files.open(str(path))
        if checkpoint is None:
            raise weight_files_error(f"there is no checkpoint in `{path}`")
        plan, source = load_plan_and_weights(checkpoint)
    if plan.adapters is None:
        return source
    from sley_core.hugging_face import merge_adapters  # imported late, because runs do not need it

    return merge_adapters(plan, source)


def extra_state_names(saved: CheckpointReader) -> dict[str, str]:
    """Returns the name in the checkpoint of each module's extra state, by the state's name; if several ranks have saved it,
    that of the first.
    """
    names: dict[str, str] = {}
    for saved_name in saved.names:
        prefix, separator, name = saved_name.partition("/extra/")
        if separator and prefix.startswith("ranks/"):
            names.setdefault(name, saved_name)
    return names


def load_parameter_state(optimizer: torch.optim.Optimizer, saved: CheckpointReader, name: str) -> None:
    """Restores the saved state of the parameter `name` in `optimizer`, whose only parameter it is, whole and on the host."""
    (parameter,) = optimizer.param_groups[0]["params"]
    values = saved.description.values
    leaves = {
        leaf: decode_value(values[state]) if state in values else saved.tensor(state)
        for leaf, state in names_by_parameter(saved).get(name, {}).items()
    }
    options = decode_value(values.get(OPTIONS + name, {}))
    states = {id(parameter): join_leaves(decode_value(saved.description.trees.get(name)), leaves)}
    dtypes = {id(parameter): BY_NAME[saved.kind(WEIGHTS + name).dtype]}
    shared.load_optimizer_state(optimizer, states, [options], shared_states(saved), shared.copy_attributes(optimizer), dtypes)


def shared_states(saved: CheckpointReader) -> shared.Shared:
    """Returns the optimizer's saved values that belong to no parameter, except options of groups, by location."""
    pairs = (decode_value(value) for name, value in saved.description.values.items() if name.startswith(SHARED))
    return {tuple(path): value for path, value in pairs}


def names_by_parameter(saved: CheckpointReader) -> dict[str, dict[str, str]]:
    """Returns, by the names of a parameter and of a leaf of its optimizer state, the leaf's name in the checkpoint."""
    names: dict[str, dict[str, str]] = {}
    for name in (*saved.names, *saved.description.values):
        if name.startswith(OPTIMIZER):
            parameter, _, leaf = name.removeprefix(OPTIMIZER).rpartition("/")
            names.setdefault(parameter, {})[leaf] = name
    return names


class SavedWeights:
    """Reads the weights and buffers of a checkpoint by their names in the registry. The weights are the averages if there are
    any, else the full-precision weights; if the optimizer has modes, those after its `eval()`.

    plan: the plan of the run that wrote the checkpoint. base: a function that returns the reader of the frozen parameters,
    which the checkpoint of a model with adapters does not contain.
    """

    def __init__(self, saved: CheckpointReader, plan: Plan, base: "Callable[[], BaseWeights]") -> None:
        self.saved = saved
        self._plan = plan
        self._base = cache(base)
        self._saved_names = extra_state_names(saved) | {
            name.removeprefix(prefix): name
            for prefix in (WEIGHTS, AVERAGES, BUFFERS, BASE)  # an average replaces the weight of its name
            for name in (*saved.names, *saved.description.values)
            if name.startswith(prefix)
        }

    @property
    def names(self) -> Sequence[str]:
        return list(self._saved_names)

    def kind(self, name: str) -> TensorKind:
        if self._saved_names[name].startswith(BASE):
            return self._base().kind(name)
        return self.saved.kind(self._saved_names[name])

    def tensor(self, name: str) -> Tensor:
        """Returns the weight or buffer `name`. Raises RunError "adapters-base" if it is a frozen parameter whose value differs
        from the one in the run that wrote the checkpoint.
        """
        if self._saved_names[name].startswith(BASE):
            value = self._base().tensor(name)
            if checksum(value) != self.saved.description.values[BASE + name]:
                raise base_error(self.saved.place, name)
            return value
        value = self.saved.tensor(self._saved_names[name])
        if not self.saved.description.state["has_modes"] or not self._saved_names[name].startswith(WEIGHTS):
            return value
        parameter = nn.Parameter(value)
        config: Any = self._plan.optimizer.config
        group = {"params": [parameter], "lr": config.lr, "initial_lr": config.lr, "weight_decay": config.weight_decay}
        optimizer: Any = shared.set_training_mode(self._plan.optimizer.build([group], parameter.device))
        load_parameter_state(optimizer, self.saved, name)
        optimizer.eval()
        return parameter.detach()


class BaseWeights:
    """Reads the initial parameters of the model of `plan`. Of layers with builders, only one is in memory at a time."""

    def __init__(self, plan: Plan) -> None:
        info = open_dataset(plan.data, DataContext(plan.run.seed, "train")).info
        self._host = HostModel(build_on_meta(plan.model, info, plan.run.seed, plan.adapters))
        self._layer: tuple[str, nn.Module] = ("", nn.Module())

    def kind(self, name: str) -> TensorKind:
        value = self.tensor(name)
        return TensorKind(DTYPES[value.dtype], tuple(value.shape))

    def tensor(self, name: str) -> Tensor:
        layer = next(layer for layer in self._host.model.layers if name.startswith(f"{layer.name}."))
        if self._layer[0] != layer.name:
            self._layer = layer.name, self._host.build_module(layer)
        return self._layer[1].get_parameter(name.removeprefix(f"{layer.name}.")).detach()


def base_error(place: str, name: str) -> RunError:
    """Returns RunError "adapters-base": the parameter `name` of the base differs from that in the run of the checkpoint at
    `place`.
    """
    hint = "restore the files and the seed of the base model; a checkpoint of adapters does not contain its weights"
    message = f"{place} was trained on a different base model: {name!r} has other values"
    return RunError("adapters-base", message, hint=hint)


def load_plan_and_weights(saved: CheckpointReader) -> tuple[Plan, SavedWeights]:
    """Returns the resolved plan of the run that wrote the checkpoint `saved`, and its weights.

    If the checkpoint is in the run's folder, the plan names the copies of its files in this folder instead of the originals.
    """
    document = read_text(saved.description.plan, saved.place, Path())
    plan = resolve_plan(use_copied_files(document, Path(saved.place).parent.parent), Loader())
    # The copied files contain no weights, so the base is read from the original files.
    return plan, SavedWeights(saved, plan, lambda: BaseWeights(resolve_plan(document, Loader())))


def join_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns the nested state of `leaves`, by name. tree: the structure with names as leaves; None for a flat dict."""
    return dict(leaves) if tree is None else tree_map(leaves.__getitem__, tree)
