"""First values of `models.llama` from safetensors files: a rank reads the tensors of its own layers, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from sley_core.api.files import WeightFiles, read_tensor
from sley_core.errors import PlanError, RunError
from sley_models import hf
from sley_models.hf import PATH, check_files

if TYPE_CHECKING:
    from sley_models.config import LlamaConfig


class FromFiles:
    """Sets the parameters of a module to the values of the files in `config.weights`, converted to its dtypes.

    Raises PlanError "model-weights" for files that cannot be read, or are not those of this model.
    """

    def __init__(self, config: LlamaConfig) -> None:
        assert config.weights is not None, config
        try:
            files = WeightFiles(config.weights)
        except RunError as error:
            raise _refused(error.diagnostics[0].message, error.diagnostics[0].hint) from None
        if problems := check_files(files, config):
            raise _refused(problems[0])
        _check_tied(files, config)
        self._stored = {
            ours: (files.stored[theirs].file, theirs)
            for ours, theirs in hf.names(config)
            if ours != hf.HEAD or not config.tie_embeddings
        }

    def __call__(self, module: nn.Module, name: str) -> None:
        """Reads the parameters of `module`, not those of its submodules. Raises RunError "weight-files"."""
        for attribute, parameter in module.named_parameters(recurse=False):
            if (stored := self._stored.get(f"{name}.{attribute}")) is not None:
                file, theirs = stored
                value = read_tensor(file, theirs)
                if value.shape != parameter.shape:
                    message = f"{theirs!r} in `{file}` is {list(value.shape)} now, and was {list(parameter.shape)} before"
                    raise RunError("weight-files", message)
                parameter.copy_(value)


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
