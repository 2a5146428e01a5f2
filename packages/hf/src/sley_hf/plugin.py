"""The plan tables and records of `hf.decoder` and `hf.lora`. Imports none of torch, transformers and peft."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from sley_core.api.files import config_folder
from sley_core.api.plan import Array, Component, ModelConfig, Plan, PlanPath, Table, ValueDescription
from sley_core.hookspecs import hookimpl
from sley_core.records import AdaptersRecord, LossRecord, ModelRecord, Problem, Record

CONFIG_NAME = "config.json"  # the file in a transformers folder that describes the model

Kernel = Literal[  # the values of `attention`
    "auto", "cudnn", "flash", "efficient", "math", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"
]


class DecoderConfig(ModelConfig):
    """A causal language model from transformers, split into its embedding, decoder layers and head. Exactly one of the keys
    `weights` and `config` is required.
    """

    weights: PlanPath | None = None
    """The initial weights: a folder written by `save_pretrained`, with `config.json` and safetensors files; or the folder of a
    run of this model, such as `runs/x`, or of one of its checkpoints, such as `runs/x/checkpoints/step-00000100`.
    """

    config: PlanPath | None = None
    """A transformers `config.json`, or the folder that contains it. Training starts from random weights."""

    attention: Kernel = "auto"  # type: ignore[assignment]  # has more values than in the base class
    """The attention kernel. As in every model, the first five values select a kernel of torch's `scaled_dot_product_attention`.
    The other values are names in transformers: "eager" computes plain matrix products, "flex_attention" is a torch kernel, and
    the last two are kernels from the packages flash-attn and flash-attn-3. The last three values train only on CUDA.

    Attention with soft-capped scores uses matrix products instead of `scaled_dot_product_attention`.
    """

    experts: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm"
    """The kernel of a mixture of experts, by its name in transformers. "grouped_mm" does not support fp64."""

    router_loss: NonNegativeFloat | None = None
    """The factor with which the load-balancing loss of a mixture of experts is added to the training loss. With 0, the
    load-balancing loss is only reported in the metrics. Default: the model's `router_aux_loss_coef` if its `config.json` sets
    `output_router_logits`; otherwise the load-balancing loss is not computed.
    """

    @model_validator(mode="after")
    def _check_source(self) -> "DecoderConfig":
        if (self.weights is None) == (self.config is None):
            raise ValueError("set either `weights`, for trained weights, or `config`, for random weights")
        read_config(self)
        return self

    @property
    def kernel(self) -> str:
        """The name of the attention kernel in transformers; "sdpa" for all kernels of `scaled_dot_product_attention`."""
        return "sdpa" if self.attention in ("auto", "cudnn", "flash", "efficient", "math") else self.attention

    @property
    def config_file(self) -> Path:
        """The path of the `config.json` that describes the model."""
        path = self.weights or self.config
        assert path is not None, self
        return config_folder(path) / CONFIG_NAME if path.is_dir() or self.weights else path

    def without_weights(self) -> "DecoderConfig":
        """Returns a table for the same model, but with random initial weights."""
        return self.model_copy(update={"weights": None, "config": self.config_file})


def read_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns the content of the model's `config.json`. Raises ValueError if it is not readable or has no `model_type`."""
    file = config.config_file
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read `{file}`: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ValueError(f"`{file}` names no `model_type`, so it is not a transformers `config.json`")
    return content


def has_router_loss(config: DecoderConfig) -> bool:
    """Returns whether training computes the load-balancing loss of the model's routers."""
    return config.router_loss is not None or bool(read_config(config).get("output_router_logits"))


def check_router_loss(config: DecoderConfig, loss: Component) -> Iterator[Problem]:
    """Yields a problem if training needs the load-balancing loss, but the plan's loss does not accept `SplitLogits`."""
    if has_router_loss(config) and not (isinstance(loss.record, LossRecord) and loss.record.split_logits):
        message = f"`{loss.name}` does not add the load-balancing loss of the routers"
        yield Problem(("loss",), message, "use `core.cross_entropy`, or remove `router_loss` and `output_router_logits`")


def check_positions(config: DecoderConfig, sequence: int | None) -> Iterator[Problem]:
    """Yields a problem if the rotary frequencies would depend on the longest position in a microbatch.

    For the types "dynamic" and "longrope", transformers recomputes the frequencies if a position exceeds the original context.
    Packed documents and slices of sequences would then give other results than whole documents. sequence: the number of
    positions per sample; None yields no problem.
    """
    content = read_config(config)
    scaling = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope_type = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
    if rope_type not in ("dynamic", "longrope") or sequence is None:
        return
    keys = ("original_max_position_embeddings", "max_position_embeddings")
    original = next((table[key] for key in keys for table in (scaling, content) if table.get(key)), None)
    if original is not None and sequence > original:
        message = (
            f"sequences of {sequence} tokens exceed the model's original context of {original}, beyond which the rotary "
            f"frequencies ({rope_type!r}) depend on the longest document of a microbatch"
        )
        yield Problem(("data", "sequence"), message, f"use a `sequence` of at most {original}")


class LoraConfig(Table):
    """Low-rank peft adapters (LoRA) on linear layers of any model. Other parameters are frozen, except those in `train`."""

    rank: PositiveInt = 8
    """The rank r of the matrices A [r, in] and B [out, r], whose product B A is added to a weight."""

    alpha: PositiveFloat = 8.0
    """The numerator of the factor alpha / rank by which the product B A is multiplied."""

    dropout: Annotated[float, Field(ge=0, lt=1), ValueDescription("a number of at least 0 and below 1")] = 0.0
    """The probability with which each input element of an adapter is set to zero."""

    targets: Literal["all-linear"] | Array[str] = "all-linear"
    """The modules that get adapters. "all-linear" selects every linear module outside of the model's last layer, the head. A
    list selects modules by the end of the name (`"q_proj"`), or by a pattern for the whole name (`"blocks.[67].*_proj"`);
    `train-cli show` lists the names. Stacked experts cannot have adapters.
    """

    rslora: bool = False
    """Whether to multiply the product B A by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023)."""

    dora: bool = False
    """Whether to also train the norm of each output's weight vector (DoRA, Liu et al. 2024)."""

    train: Array[str] = ()
    """The parameters of the base model that are trained in full: ends of names, or patterns for whole names (`"head.*"`)."""


@hookimpl
def sley_records() -> list[Record]:
    return [
        ModelRecord(
            name="decoder",
            config=DecoderConfig,
            build="sley_hf.decoder:build_layers",
            hugging_face="sley_hf.export:build_hugging_face_model",
            compare="sley_hf.export:compare_with_transformers",
            uses_layer_names=True,
        ),
        AdaptersRecord(
            name="lora",
            config=LoraConfig,
            build="sley_hf.lora:build_adapter",
            merge="sley_hf.lora:MergedWeights",
            export="sley_hf.lora:export_adapter",
        ),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    if isinstance(plan.model.config, DecoderConfig):
        yield from check_router_loss(plan.model.config, plan.loss)
        yield from check_positions(plan.model.config, getattr(plan.data.config, "sequence", None))
