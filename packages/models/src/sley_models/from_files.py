"""First values of `models.llama` from safetensors files, read one tensor at a time when a rank needs them.

`sley_core::read_` is an operation like `copy_`, so that a factory's record contains it (`record`): what a constructor drew
before is not drawn at all, and only the ranks that own a layer read its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.api.files import WeightFiles, read_tensor
from sley_core.errors import PlanError, RunError
from sley_models import hf
from sley_models.check import PATH, check_files

if TYPE_CHECKING:
    from sley_models.config import LlamaConfig

_LIBRARY: Any = torch.library.Library("sley_core", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
_LIBRARY.define("read_(Tensor(a!) self, str file, str name) -> Tensor(a!)")


def _read(target: Tensor, file: str, name: str) -> Tensor:
    """Copies the tensor `name` of `file` into `target`, converted to its dtype. Raises RunError "weight-files"."""
    value = read_tensor(Path(file), name)
    if value.shape != target.shape:
        message = f"{name!r} in `{file}` is {list(value.shape)} now, and was {list(target.shape)} when the run began"
        raise RunError("weight-files", message)
    return target.copy_(value)


_LIBRARY.impl("read_", _read, "CPU")
_LIBRARY.impl("read_", lambda target, file, name: target, "Meta")


@torch.no_grad()
def take_from_files(modules: Mapping[str, nn.Module], config: LlamaConfig) -> None:
    """Sets all parameters of the layers `modules`, by name, to the values of the files in `config.weights`.

    Raises PlanError "model-weights" for files that cannot be read, or are not those of this model.
    """
    assert config.weights is not None, config
    try:
        files = WeightFiles(config.weights)
    except RunError as error:
        raise _refused(error.diagnostics[0].message, error.diagnostics[0].hint) from None
    if problems := check_files(files, config):
        raise _refused(problems[0])
    _check_tied(files, config)
    for ours, theirs in hf.names(config):
        layer = max((name for name in modules if ours.startswith(f"{name}.")), key=len)
        parameter = modules[layer].get_parameter(ours.removeprefix(f"{layer}."))
        if ours != hf.HEAD or not config.tie_embeddings:
            read: Any = torch.ops.sley_core.read_
            read(parameter.detach(), str(files.stored[theirs].file), theirs)


def _check_tied(files: WeightFiles, config: LlamaConfig) -> None:
    """Raises PlanError "model-weights" if files of a tied model have a separate head that differs from the embedding."""
    if not config.tie_embeddings or hf.THEIR_HEAD not in files.stored:
        return
    embedding = dict(hf.names(config))["embed.tokens.weight"]
    if not torch.equal(files.tensor(hf.THEIR_HEAD), files.tensor(embedding)):
        message = f"tie_word_embeddings is true, but {hf.THEIR_HEAD!r} has other values than {embedding!r}"
        raise _refused(message, "remove it, or set `tie_word_embeddings` to false in `config.json`")


def _refused(message: str, hint: str | None = None) -> PlanError:
    return PlanError("model-weights", message, path=PATH, hint=hint)
