"""The table of `core.llama`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from sley_core.plan.tables import ModelConfig
from sley_core.table import Positive, PositiveFloat

FFN_MULTIPLE = 64


def default_ffn_hidden(hidden: int) -> int:
    """8/3 of `hidden`, so that SwiGLU's three matrices weigh what two of 4 x hidden do (Shazeer 2020), in whole 64s."""
    return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def _default_kv_heads(chosen: dict[str, Any]) -> int:
    return int(chosen["heads"])


def _default_head_dim(chosen: dict[str, Any]) -> int:
    return int(chosen["hidden"] // chosen["heads"])


def _default_ffn_hidden(chosen: dict[str, Any]) -> int:
    return default_ffn_hidden(chosen["hidden"])


class LlamaConfig(ModelConfig):
    """A Llama-shaped decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    num_layers: Positive
    """Decoder blocks."""

    hidden: Positive
    """Width of the residual stream."""

    heads: Positive
    """Query heads of a block's attention; they divide `hidden`."""

    kv_heads: Positive = Field(default_factory=_default_kv_heads)
    """Key and value heads, each shared by `heads / kv_heads` query heads; left out, as many as `heads`."""

    head_dim: Positive = Field(default_factory=_default_head_dim, validate_default=True)
    """Width of one head, an even number; left out, `hidden / heads`."""

    ffn_hidden: Positive = Field(default_factory=_default_ffn_hidden)
    """Width inside the feed-forward part; left out, 8/3 of `hidden` rounded up to a multiple of 64."""

    vocab_size: Positive | None = None
    """Rows of the embedding and of the head; left out, as many as the data has token ids."""

    tie_embeddings: bool = False
    """Whether the head's matrix is the embedding's."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""

    norm_eps: PositiveFloat = 1e-5
    """What RMSNorm adds to the mean square."""

    init_std: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Standard deviation of the first weights; over sqrt(2 x blocks) where a block adds to the residual stream."""

    @field_validator("heads")
    @classmethod
    def _heads_divide_hidden(cls, heads: int, info: ValidationInfo) -> int:
        hidden = info.data.get("hidden")
        if hidden is not None and hidden % heads:
            raise ValueError(f"hidden / heads = {hidden} / {heads} is not a whole number")
        return heads

    @field_validator("kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, kv_heads: int, info: ValidationInfo) -> int:
        heads = info.data.get("heads")
        if heads is not None and heads % kv_heads:
            raise ValueError(f"heads / kv_heads = {heads} / {kv_heads} is not a whole number")
        return kv_heads

    @field_validator("head_dim")
    @classmethod
    def _head_dim_is_even(cls, head_dim: int, info: ValidationInfo) -> int:
        if head_dim % 2:
            hidden, heads = info.data.get("hidden"), info.data.get("heads")
            origin = f" = hidden / heads = {hidden} / {heads}" if head_dim * (heads or 0) == hidden else ""
            raise ValueError(f"head_dim{origin} = {head_dim} is odd; rotary positions turn pairs of channels")
        return head_dim
