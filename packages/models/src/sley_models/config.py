"""The table of `models.llama`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from sley_core.api.plan import ModelConfig, PlanPath, Positive, PositiveFloat, Table
from sley_models.hf_config import CONFIG, read_config

FFN_MULTIPLE = 64


def default_ffn_hidden(hidden: int) -> int:
    """Returns 8/3 of `hidden`, rounded up to a multiple of 64: SwiGLU's three matrices then have the size of two of 4 x hidden
    (Shazeer 2020).
    """
    return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def _default_kv_heads(chosen: dict[str, Any]) -> int:
    return int(chosen["heads"])


def _default_head_dim(chosen: dict[str, Any]) -> float:
    """Returns `hidden / heads`; a float if that is not a whole number, which `_head_dim_is_whole` refuses."""
    hidden, heads = chosen["hidden"], chosen["heads"]
    return float(hidden / heads) if hidden % heads else int(hidden // heads)


def _default_ffn_hidden(chosen: dict[str, Any]) -> int:
    return default_ffn_hidden(chosen["hidden"])


class RopeScaling(Table):
    """How Llama 3.1 slows rotary positions down for longer contexts (`rope_type` "llama3"); names are Hugging Face's."""

    factor: PositiveFloat
    """Divisor of the slow frequencies."""

    low_freq_factor: PositiveFloat
    """A channel that turns less often than this within the original context is slow."""

    high_freq_factor: PositiveFloat
    """A channel that turns more often than this is fast, and stays as it is."""

    original_max_position_embeddings: Positive
    """Tokens of the context that the model was first trained on."""

    @field_validator("high_freq_factor")
    @classmethod
    def _high_is_above_low(cls, high: float, info: ValidationInfo) -> float:
        """Raises ValueError unless `high_freq_factor` is above `low_freq_factor`."""
        low = info.data.get("low_freq_factor")
        if low is not None and high <= low:
            raise ValueError(f"it is not above low_freq_factor = {low:g}")
        return high


def _sizes_or_weights(schema: dict[str, Any]) -> None:
    """Declares in the JSON Schema that sizes may be left out if there is `weights`."""
    schema["anyOf"] = [{"required": ["weights"]}, {"required": schema.pop("required")}]


class LlamaConfig(ModelConfig, json_schema_extra=_sizes_or_weights):
    """A Llama-shaped decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; Qwen2 and Qwen3 by options.

    Keys that `weights` determines may be left out if it is given, and must otherwise agree with it.
    """

    weights: PlanPath | None = None
    """A folder with a Hugging Face Llama, Qwen2 or Qwen3 to start from: `config.json` and safetensors files."""

    num_layers: Positive
    """Decoder blocks."""

    hidden: Positive
    """Width of the residual stream."""

    heads: Positive
    """Query heads of a block's attention; they divide `hidden`, unless there is a `head_dim`."""

    kv_heads: Positive = Field(default_factory=_default_kv_heads)
    """Key and value heads, each shared by `heads / kv_heads` query heads; left out, as many as `heads`."""

    head_dim: Positive = Field(default_factory=_default_head_dim, validate_default=True)
    """Width of one head, an even number; left out, `hidden / heads`."""

    ffn_hidden: Positive = Field(default_factory=_default_ffn_hidden)
    """Width inside the feed-forward part; left out, 8/3 of `hidden` rounded up to a multiple of 64."""

    vocab_size: Positive | None = None
    """Rows of the embedding and of the head; left out, as many as the data has token ids."""

    tie_embeddings: bool = False
    """Whether head and embedding share one matrix."""

    qkv_bias: bool = False
    """Whether queries, keys and values have biases, as in Qwen2."""

    qk_norm: bool = False
    """Whether queries and keys are normalised per head before rotation, as in Qwen3."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """Slower rotary positions for longer contexts, as in Llama 3.1; left out, none."""

    norm_eps: PositiveFloat = 1e-5
    """What RMSNorm adds to the mean square."""

    init_std: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 x blocks) for weights that add to the residual stream."""

    @model_validator(mode="before")
    @classmethod
    def _filled_from_weights(cls, given: Any, info: ValidationInfo) -> Any:
        """Fills in keys that are left out from the `config.json` of `weights`.

        If the folder has no such file but all sizes are given, as in the resolved plan of a finished run, those are used: only
        a run needs the files, and its check reports that they are missing.
        """
        if not isinstance(given, dict) or not isinstance(given.get("weights"), str | Path):
            return given
        folder = Path((info.context or {}).get("folder") or "", given["weights"])
        if not (folder / CONFIG).exists() and {"num_layers", "hidden", "heads"} <= given.keys():
            return given
        sizes = read_config(folder).keys
        return {**{key: value for key, value in sizes.items() if value is not None}, **given}

    @field_validator("*")
    @classmethod
    def _agrees_with_weights(cls, value: Any, info: ValidationInfo) -> Any:
        """Raises ValueError for a value that differs from what the `config.json` of `weights` says."""
        folder, key = info.data.get("weights"), info.field_name or ""
        if folder is None or not (folder / CONFIG).exists():
            return value
        known = read_config(folder)
        if key in known.keys and key in known.names:
            plain = value.model_dump() if isinstance(value, Table) else value
            if plain != known.keys[key]:
                theirs = f"`{folder / CONFIG}` has {known.names[key]} = {known.said(key)}"
                raise ValueError(f"{plain} is not what the weights need: {theirs}")
        return value

    @field_validator("kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, kv_heads: int, info: ValidationInfo) -> int:
        """Raises ValueError unless `kv_heads` divides `heads`."""
        heads = info.data.get("heads")
        if heads is not None and heads % kv_heads:
            raise ValueError(f"heads / kv_heads = {heads} / {kv_heads} is not a whole number")
        return kv_heads

    @field_validator("head_dim", mode="before")
    @classmethod
    def _head_dim_is_whole(cls, head_dim: Any, info: ValidationInfo) -> Any:
        """Raises ValueError if the default, `hidden / heads`, is not a whole number."""
        hidden, heads = info.data.get("hidden"), info.data.get("heads")
        if isinstance(head_dim, float) and hidden is not None and heads and head_dim == hidden / heads:
            raise ValueError(f"hidden / heads = {hidden} / {heads} is not a whole number")
        return head_dim

    @field_validator("head_dim")
    @classmethod
    def _head_dim_is_even(cls, head_dim: int, info: ValidationInfo) -> int:
        """Raises ValueError for an odd `head_dim`: rotary positions rotate pairs of channels."""
        if head_dim % 2:
            hidden, heads = info.data.get("hidden"), info.data.get("heads")
            origin = f" = hidden / heads = {hidden} / {heads}" if head_dim * (heads or 0) == hidden else ""
            raise ValueError(f"head_dim{origin} = {head_dim} is odd; rotary positions turn pairs of channels")
        return head_dim
