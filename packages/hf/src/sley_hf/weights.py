"""Reads the initial values of `hf.decoder` from safetensors files, and provides the tensors of exported files.

Stored tensors may have other names and layouts than the model. For example, older versions of transformers used other names, or
each expert is a separate tensor. This module applies the renamings and conversions that transformers has for each family.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping

from sley_core.api.files import TensorInfo, TensorReader, open_weights
from sley_core.api.state import BY_NAME, DTYPES, shorten_names
from sley_core.errors import PlanError, RunError
from sley_hf.structure import ModuleNames, to_layer_name

WEIGHTS_KEY_PATH = ("model", "weights")
"""The plan key to which errors about the files refer."""


class FileInitializer:
    """Sets the parameters of modules to the values in the safetensors files of `folder`. Files of a run have Sley's names;
    other files have transformers' names. causal: the transformers model, possibly on meta. Raises PlanError "model-weights" if
    the files cannot be read or belong to another model.
    """

    def __init__(self, folder: Path, causal: Any, structure: ModuleNames) -> None:
        try:
            self._folder, self._weights = folder, open_weights(folder)
        except RunError as error:
            diagnostic = error.diagnostics[0]
            raise PlanError("model-weights", diagnostic.message, path=WEIGHTS_KEY_PATH, hint=diagnostic.hint) from None
        self._causal = causal
        self._converters: dict[str, core_model_loading.WeightConverter] = {}  # keyed by source pattern
        self._sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)  # stored names and patterns, keyed by target
        self._targets: dict[str, str] = {}  # the key in `_sources` of each name that its conversion yields
        self._find_sources({to_layer_name(name, structure): name for name in causal.state_dict()})
        tied = set(causal._tied_weights_keys or ()) if causal.config.tie_word_embeddings else set()
        parameters = {n: p for n, p in causal.named_parameters(remove_duplicate=False) if n not in tied}
        self._names = {to_layer_name(name, structure): name for name in parameters}
        problems = []
        for name, parameter in parameters.items():
            if name not in self._targets:
                problems.append(f"{name!r} is missing")
                continue
            stored, pattern = self._sources[self._targets[name]][0]
            # The shape of a converted tensor is known only after the conversion.
            if pattern is None and (shape := self._weights.info(stored).shape) != tuple(parameter.shape):
                problems.append(f"{name!r} has the shape {list(shape)} and not {list(parameter.shape)}")
        if problems:
            message = f"the files in `{folder}` are not the weights of this model: {shorten_names(problems)}"
            raise PlanError("model-weights", message, path=WEIGHTS_KEY_PATH, hint="use a folder that `save_pretrained` wrote")

    def _find_sources(self, names_in_runs: Mapping[str, str]) -> None:
        """Finds the stored tensors of each tensor of the model. names_in_runs: transformers' names, keyed by Sley's names."""
        transforms = get_model_conversion_mapping(self._causal)
        renamings = [transform for transform in transforms if isinstance(transform, core_model_loading.WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, core_model_loading.WeightConverter)]
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, state = self._causal.base_model_prefix, self._causal.state_dict()
        for stored in sorted(self._weights.names, key=core_model_loading.dot_natural_key):
            target, pattern = core_model_loading.rename_source_key(stored, renamings, converters, prefix, state)
            if stored in names_in_runs or (target not in state and stored in state):
                target, pattern = names_in_runs.get(stored, stored), None
            self._sources[target].append((stored, pattern))
            self._targets[target] = target
            if pattern is not None:
                first, *other_patterns = self._converters[pattern].target_patterns
                self._targets |= {target.replace(first, name): target for name in other_patterns}

    def __call__(self, module: nn.Module, name: str) -> None:
        """Sets the parameters that `module` itself owns. name: the name of the module in Sley's model. Raises RunError
        "weight-files" for a bad file or a wrong shape.
        """
        for attribute, parameter in module.named_parameters(recurse=False):
            if (hf_name := self._names.get(f"{name}.{attribute}")) is not None:
                value = self._read(hf_name)
                if value.shape != parameter.shape:
                    message = f"{hf_name!r} in `{self._folder}` has the shape {list(value.shape)}, not {list(parameter.shape)}"
                    raise RunError("weight-files", message)
                parameter.copy_(value)

    def _read(self, name: str) -> Tensor:
        """Returns the value of the parameter that transformers calls `name`."""
        target = self._targets[name]
        stored, pattern = self._sources[target][0]
        if pattern is None:
            return self._weights.tensor(stored)
        converter: Any = deepcopy(self._converters[pattern])
        for stored_name, source_pattern in self._sources[target]:
            converter.add_tensor(target, stored_name, source_pattern, self._weights.tensor(stored_name))
        value = converter.convert(target, model=self._causal, config=self._causal.config)[name]
        tensor: Tensor = value[0] if isinstance(value, list) else value
        return tensor


class ExportedWeights:
    """Reads the weights in `source` with the names and layouts of the files that transformers' `save_pretrained` writes. Only
    one layer is in memory at a time. causal: the transformers model, whose parameters may be on meta. names: transformers' name
    of each weight, keyed by its name in the run.
    """

    def __init__(self, source: TensorReader, causal: Any, names: Mapping[str, str]) -> None:
        self._source, self._causal = source, causal
        self._weights: dict[str, dict[str, str]] = defaultdict(dict)  # for each layer, the run's names by transformers' names
        for name, hf_name in names.items():
            self._weights[".".join(name.split(".")[:2])][hf_name] = name
        self._kinds: dict[str, tuple[str, TensorInfo]] = {}
        for layer in self._weights:
            for stored, value in self._convert(layer, self._empty).items():
                self._kinds[stored] = layer, TensorInfo(DTYPES[value.dtype], tuple(value.shape))
        self._layer: tuple[str, dict[str, Tensor]] = ("", {})

    def _convert(self, layer: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of one layer as files store them. read: returns the tensor of the run with a given name."""
        state = {hf_name: read(name) for hf_name, name in self._weights[layer].items()}
        tensors: dict[str, Tensor] = core_model_loading.revert_weight_conversion(self._causal, state)
        return tensors

    def _empty(self, name: str) -> Tensor:
        kind = self._source.info(name)
        return torch.empty(kind.shape, dtype=BY_NAME[kind.dtype], device="meta")

    @property
    def names(self) -> Sequence[str]:
        return list(self._kinds)

    def info(self, name: str) -> TensorInfo:
        return self._kinds[name][1]

    def tensor(self, name: str) -> Tensor:
        layer, _ = self._kinds[name]
        if self._layer[0] != layer:
            self._layer = layer, self._convert(layer, self._source.tensor)
        return self._layer[1][name]
