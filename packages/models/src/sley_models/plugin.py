"""The plan table and record of `models.llama`. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

from sley_core.api.plan import ModelConfig, PlanPath, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import ModelRecord

FFN_MULTIPLE = 64
"""The default width of the feed-forward layers is a multiple of this number, for fast matrix products."""


def compute_default_ffn_hidden(hidden: int) -> int:
    """Returns 8/3 of `hidden`, rounded up to a multiple of 64. With this width, SwiGLU's three matrices have about as many
    elements as two matrices of hidden x 4 hidden (Shazeer 2020).
    """
    return -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


class RopeScaling(Table):
    """Lowers the rotary frequencies for longer contexts, as in Llama 3.1, with the keys of Hugging Face's type "llama3"."""

    factor: PositiveFloat
    """The divisor of low frequencies."""

    low_freq_factor: PositiveFloat
    """The number of rotations within the original context below which a frequency is low."""

    high_freq_factor: PositiveFloat
    """The number of rotations within the original context above which a frequency is high, and is not changed."""

    original_max_position_embeddings: PositiveInt
    """The length of the original context in tokens."""

    @field_validator("high_freq_factor")
    @classmethod
    def _check_high_freq_factor(cls, high: float, info: ValidationInfo) -> float:
        """Raises ValueError unless `high_freq_factor` is above `low_freq_factor`."""
        low = info.data.get("low_freq_factor")
        if low is not None and high <= low:
            raise ValueError(f"it must be greater than low_freq_factor = {low:g}")
        return high


def _require_sizes_or_weights(schema: dict[str, Any]) -> None:
    """Changes the JSON Schema so that it requires either `weights` or the sizes."""
    schema["anyOf"] = [{"required": ["weights"]}, {"required": schema.pop("required")}]


class LlamaConfig(ModelConfig, json_schema_extra=_require_sizes_or_weights):
    """A Llama decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU. Options make it a Qwen2 or Qwen3.

    With `weights`, the keys that the weights determine are optional. If such a key is set, it must agree with the weights.
    """

    weights: PlanPath | None = None
    """The folder with the initial weights: of a Hugging Face Llama, Qwen2 or Qwen3, with `config.json` and safetensors files;
    or of a run of this model, such as `runs/x`; or of one of its checkpoints, such as `runs/x/checkpoints/step-00000100`.
    Default: random weights.
    """

    num_layers: PositiveInt
    """The number of decoder blocks."""

    hidden: PositiveInt
    """The width of the residual stream."""

    heads: PositiveInt
    """The number of query heads, which must divide `hidden` unless `head_dim` is set."""

    kv_heads: PositiveInt = Field(default_factory=lambda values: int(values["heads"]))
    """The number of key and value heads, each shared by `heads / kv_heads` query heads. Default: `heads`."""

    head_dim: PositiveInt = Field(default_factory=lambda values: values["hidden"] / values["heads"], validate_default=True)
    """The width of a head, an even number. Default: `hidden / heads`."""

    ffn_hidden: PositiveInt = Field(default_factory=lambda values: compute_default_ffn_hidden(values["hidden"]))
    """The inner width of the feed-forward layers. Default: 8/3 of `hidden`, rounded up to a multiple of 64."""

    vocab_size: PositiveInt | None = None
    """The number of rows of the embedding and of the head. Default: the vocabulary size of the data."""

    tie_embeddings: bool = False
    """Whether the head and the embedding share one matrix."""

    qkv_bias: bool = False
    """Whether queries, keys and values have biases, as in Qwen2."""

    qk_norm: bool = False
    """Whether queries and keys are normalised per head before rotation, as in Qwen3."""

    rope_theta: PositiveFloat = 10000.0
    """The base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """The scaling of rotary positions for longer contexts, as in Llama 3.1. Default: no scaling."""

    norm_eps: PositiveFloat = 1e-5
    """The term that RMSNorm adds to the mean square."""

    init_std: Annotated[float, Field(gt=0, le=1)] = 0.02
    """The standard deviation of initial weights, divided by sqrt(2 x num_layers) for projections into the residual stream."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_weights(cls, values: Any, info: ValidationInfo) -> Any:
        """Fills in missing keys from the config of `weights`. Raises ValueError for a key that differs from this config.

        Changes nothing if the file with the config is missing but all required sizes are set, as in the resolved plan of a
        complete run. Only a new run needs the files of `weights`, and its check reports missing ones.
        """
        if not isinstance(values, dict) or not isinstance(values.get("weights"), str | Path):
            return values
        from sley_models.hf_config import find_config_path, read_config  # a model without `weights` does not need it

        folder = Path((info.context or {}).get("folder") or "", values["weights"])
        if not find_config_path(folder).exists() and {"num_layers", "hidden", "heads"} <= values.keys():
            return values
        sizes = read_config(folder).keys
        for key in sizes.keys() & values.keys() - {"init_std"}:
            value = values[key].model_dump() if isinstance(values[key], Table) else values[key]
            if value != sizes[key]:
                raise ValueError(
                    f"`{key}` = {value} does not match the weights, whose `{find_config_path(folder)}` has {sizes[key]}"
                )
        return {**{key: value for key, value in sizes.items() if value is not None}, **values}

    @field_validator("kv_heads")
    @classmethod
    def _check_kv_heads(cls, kv_heads: int, info: ValidationInfo) -> int:
        """Raises ValueError unless `kv_heads` divides `heads`."""
        heads = info.data.get("heads")
        if heads is not None and heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, but heads / kv_heads = {heads} / {kv_heads}")
        return kv_heads

    @field_validator("head_dim", mode="before")
    @classmethod
    def _check_head_dim(cls, head_dim: Any, info: ValidationInfo) -> Any:
        """Raises ValueError for a default that is not a whole number, and for an odd number, since channels rotate in pairs."""
        hidden, heads = info.data.get("hidden", 0), info.data.get("heads", 1)
        is_quotient = head_dim == hidden / heads
        if is_quotient and hidden % heads:
            raise ValueError(f"hidden must be a multiple of heads, but hidden / heads = {hidden} / {heads}")
        if isinstance(head_dim, int | float) and head_dim % 2 == 1:
            origin = f" = hidden / heads = {hidden} / {heads}" if is_quotient else ""
            raise ValueError(f"head_dim{origin} must be even for rotary positions, but is {head_dim:g}")
        return int(head_dim) if is_quotient else head_dim


@hookimpl
def sley_records() -> list[ModelRecord]:
    return [
        ModelRecord(
            name="llama",
            config=LlamaConfig,
            build="sley_models.llama:build_llama",
            hugging_face="sley_models.hf:build_hugging_face_model",
            uses_layer_names=True,
        )
    ]
