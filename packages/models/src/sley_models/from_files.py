"""Initial values of `models.llama` from safetensors files. A rank reads only the tensors of its layers, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from sley_core.api.files import TensorReader, open_weights
from sley_core.errors import PlanError, RunError
from sley_models import hf
from sley_models.hf import PATH, check_files

if TYPE_CHECKING:
    from sley_models.config import LlamaConfig


class FileInitializer:
    """Sets the parameters of modules to the values in the files of `config.weights`, converted to the parameters' dtypes.

    Raises PlanError "model-weights" if the files cannot be read or belong to another model.
    """

    def __init__(self, config: LlamaConfig) -> None:
        assert config.weights is not None, config
        try:
            files = open_weights(config.weights)
        except RunError as error:
            raise _weights_error(error.diagnostics[0].message, error.diagnostics[0].hint) from None
        if problems := check_files(files, config):
            raise _weights_error(problems[0])
        _check_tied_head(files, config)
        self._files, self._stored_names = files, dict(hf.stored_name_pairs(config))
        self._folder = config.weights

    def __call__(self, module: nn.Module, name: str) -> None:
        """Reads the parameters of `module` without submodules. Raises RunError "weight-files" if a shape has changed."""
        for attribute, parameter in module.named_parameters(recurse=False):
            if (stored_name := self._stored_names.get(f"{name}.{attribute}")) is not None:
                value = self._files.tensor(stored_name)
                if value.shape != parameter.shape:
                    shapes = f"was {list(parameter.shape)}, but is now {list(value.shape)}"
                    raise RunError("weight-files", f"the shape of {stored_name!r} in `{self._folder}` {shapes}")
                parameter.copy_(value)


def _check_tied_head(files: TensorReader, config: LlamaConfig) -> None:
    """Raises PlanError "model-weights" if the files of a tied model have a head that differs from the embedding."""
    if not config.tie_embeddings or hf.HF_HEAD not in files.names:
        return
    embedding = dict(hf.name_pairs(config))["embed.tokens.weight"]
    if not torch.equal(files.tensor(hf.HF_HEAD), files.tensor(embedding)):
        message = f"tie_word_embeddings is true, but {hf.HF_HEAD!r} and {embedding!r} have different values"
        raise _weights_error(message, "remove the head from the files, or set `tie_word_embeddings` to false in `config.json`")


def _weights_error(message: str, hint: str | None = None) -> PlanError:
    return PlanError("model-weights", message, path=PATH, hint=hint)
