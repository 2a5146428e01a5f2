"""Initial values of `hf.decoder` from safetensors files. A rank reads only the tensors of its layers, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from sley_core.api.files import WeightFiles, read_tensor
from sley_core.errors import PlanError, RunError

if TYPE_CHECKING:
    from sley_hf.structure import Structure

PATH = ("model", "weights")


class FileInitializer:
    """Sets the parameters of a module to the values in the files of `folder`, converted to its dtypes.

    Raises PlanError "model-weights" if the files cannot be read or belong to another model.
    """

    def __init__(self, folder: Path, causal: Any, structure: Structure) -> None:
        from sley_hf.decoder import layer_name

        try:
            files = WeightFiles(folder)
        except RunError as error:
            diagnostic = error.diagnostics[0]
            raise PlanError("model-weights", diagnostic.message, path=PATH, hint=diagnostic.hint) from None
        # files of a base model have no prefix: `h.0.ln_1.weight` instead of `transformer.h.0.ln_1.weight`
        base = structure.base
        tied = set(causal._tied_weights_keys or ()) if causal.config.tie_word_embeddings else set()
        self._sources: dict[str, tuple[Path, str]] = {}
        problems = []
        for name, parameter in causal.named_parameters(remove_duplicate=False):
            stored = next((alias for alias in (name, name.removeprefix(f"{base}.")) if alias in files.stored), None)
            if stored is None:
                problems += [] if name in tied else [f"{name!r} is missing"]
            elif files.stored[stored].shape != tuple(parameter.shape):
                problems.append(f"{name!r} is {list(files.stored[stored].shape)} and not {list(parameter.shape)}")
            elif name not in tied:
                self._sources[layer_name(name, structure)] = files.stored[stored].file, stored
        if problems:
            more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
            message = f"the files in `{folder}` are not the weights of this model: {', '.join(problems[:4])}{more}"
            raise PlanError("model-weights", message, path=PATH, hint="use a folder that `save_pretrained` wrote")

    def __call__(self, module: nn.Module, name: str) -> None:
        """Reads the parameters of `module` without its submodules. Raises RunError "weight-files" if the files have changed."""
        for attribute, parameter in module.named_parameters(recurse=False):
            if (source := self._sources.get(f"{name}.{attribute}")) is not None:
                value = read_tensor(*source)
                if value.shape != parameter.shape:
                    message = f"the shape of {source[1]!r} in `{source[0]}` has changed to {list(value.shape)}"
                    raise RunError("weight-files", message)
                parameter.copy_(value)
