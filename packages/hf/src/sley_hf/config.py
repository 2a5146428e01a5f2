"""The plan table of `hf.decoder`. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from sley_core.api.plan import ModelConfig, PlanPath

CONFIG = "config.json"


class DecoderConfig(ModelConfig):
    """A causal language model of transformers, cut into its embedding, decoder layers, and head.

    Exactly one of `weights` and `config` is required.
    """

    weights: PlanPath | None = None
    """The folder that `save_pretrained` wrote: `config.json` and safetensors files. Training starts from these weights."""

    config: PlanPath | None = None
    """A `config.json` of transformers, or its folder. Training starts from random weights."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    """The attention kernel: torch's `scaled_dot_product_attention`, or plain matrix products.

    Attentions with soft-capped scores always use the latter.
    """

    experts: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm"
    """The kernel of a mixture of experts, by its name in transformers; `grouped_mm` does not compute in fp64."""

    @model_validator(mode="after")
    def _check_source(self) -> DecoderConfig:
        """Raises ValueError unless exactly one of `weights` and `config` names a readable `config.json`."""
        if (self.weights is None) == (self.config is None):
            raise ValueError("set either `weights`, for trained weights, or `config`, for random ones")
        read_config(self)
        return self

    @property
    def config_file(self) -> Path:
        """The path of `config.json`."""
        path = self.weights or self.config
        assert path is not None, self
        return path / CONFIG if path.is_dir() or self.weights else path


def read_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns the content of the model's `config.json`. Raises ValueError if it is not readable or names no type of model."""
    file = config.config_file
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read `{file}`: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ValueError(f"`{file}` names no `model_type`, so it is not a `config.json` of transformers")
    return content
