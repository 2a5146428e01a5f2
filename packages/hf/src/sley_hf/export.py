"""Describes a run of `hf.decoder` as a transformers model, and checks an export against the run.

The check computes the logits of the same prompt with the run's own layers and with the exported model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from sley_core.api.data import TOKEN_FIELDS, DataInfo
from sley_core.api.files import HuggingFaceModel, TensorReader, describe_model
from sley_core.api.model import Model
from sley_core.api.plan import Plan
from sley_core.api.state import shorten_names
from sley_core.errors import RunError
from sley_hf.decoder import build_from_config, list_ties, read_hf_config
from sley_hf.plugin import DecoderConfig
from sley_hf.structure import to_layer_name
from sley_hf.weights import HubWeights

PROMPT_LENGTH = 16
"""The maximum number of tokens of the prompt of the check."""

TOLERANCE = 1e-5
"""The maximum difference of hidden states or logits in fp32, relative to the largest value."""


def build_hugging_face_model(plan: Plan, source: TensorReader) -> HuggingFaceModel:
    """Implements `ModelRecord.hugging_face`. Raises RunError "weights-mismatch" if the weights do not fit the plan's model."""
    config = plan.model.config
    assert isinstance(config, DecoderConfig), config
    hf_config = read_hf_config(config)
    causal, structure = build_from_config(hf_config, kernel="eager", experts="eager")
    tied = {name for _, name in list_ties(causal, structure)}
    names, shapes = {}, {}
    for hf_name, value in causal.state_dict().items():
        if (name := to_layer_name(hf_name, structure)) not in tied:
            names[name], shapes[name] = hf_name, tuple(value.shape)
    problems = [f"{name!r} is missing" for name in names if name not in source.names]
    problems += [f"{name!r} is unknown" for name in source.names if name not in names]
    problems += [
        f"{name!r} is {list(source.kind(name).shape)} and not {list(shapes[name])}"
        for name in names
        if not problems and source.kind(name).shape != shapes[name]
    ]
    if problems:
        raise RunError("weights-mismatch", f"these are not the weights of the plan's model: {shorten_names(problems)}")
    content = hf_config.to_diff_dict() | {"architectures": [type(causal).__name__]}
    return replace(describe_model(content, names, plan, source), files=HubWeights(source, causal, names))


def check_export(plan: Plan, model: HuggingFaceModel, source: TensorReader, folder: Path) -> None:
    """Raises RunError "export-differs" unless the exported model in `folder` computes the same logits as the run's layers.
    model: the exported model, of which only the `names` are used. source: the weights of the run. The message names the first
    tensor that differs, or else the last layer with the same output.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    causal: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    exported = causal.state_dict()
    for name, hf_name in model.names.items():
        if hf_name not in exported or not torch.equal(_to_loaded_dtype(source.tensor(name)), exported[hf_name]):
            raise _build_difference_error(folder, f"the tensor {hf_name!r} differs from {name!r} of the run")
    vocab_size = causal.config.vocab_size
    length = min(PROMPT_LENGTH, getattr(causal.config, "max_position_embeddings", None) or PROMPT_LENGTH)
    tokens = torch.arange(length)[None] % vocab_size
    with torch.no_grad():
        output = causal(input_ids=tokens, output_hidden_states=True, use_cache=False)
        *actual, (_, logits) = _compute_layer_outputs(plan, source, tokens, vocab_size)
    if not _is_close(logits, output.logits):
        last = "none"
        for (name, hidden), expected in zip(actual, output.hidden_states[:-1], strict=False):  # the last follows the norm
            if not _is_close(hidden, expected):
                break
            last = name
        raise _build_difference_error(
            folder, f"its logits differ from those of the run; the last layer with the same output is {last!r}"
        )


def _build_difference_error(folder: Path, message: str) -> RunError:
    return RunError("export-differs", f"the export in `{folder}` is wrong: {message}", hint="please report this as a bug")


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _to_loaded_dtype(value: Tensor) -> Tensor:
    """Returns the value in the dtype in which `check_export` loads it: fp32 for floating-point values."""
    return value.float() if value.is_floating_point() else value


def _compute_layer_outputs(plan: Plan, source: TensorReader, tokens: Tensor, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the output of each layer for token ids [1, s], in fp32. One layer is in memory at a time."""
    plan_config: Any = plan.model.config
    config = plan_config.without_weights().model_copy(update={"attention": "auto"})  # other kernels may need CUDA
    record: Any = plan.model.record
    model: Model = record.load(record.build)(config, DataInfo(TOKEN_FIELDS, vocab_size))
    ties = {second: first for first, second in model.ties}
    output = tokens
    for layer in model.layers:
        model.build_layer(layer, 0, initialises=False)
        _load_values(layer.module, layer.name, source, ties)
        output = layer.module.eval()(output)
        layer.module = nn.Module()
        yield layer.name, output


def _load_values(layer: nn.Module, layer_name: str, source: TensorReader, ties: Mapping[str, str]) -> None:
    """Sets a layer's parameters and persistent buffers from `source`. ties: the name in `source` of each tied parameter."""
    for prefix, module in layer.named_modules(prefix=layer_name):
        for attribute in module._parameters:
            name = f"{prefix}.{attribute}"
            if module._parameters[attribute] is not None:
                value = source.tensor(ties.get(name, name)).float()
                module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        for attribute in module._buffers:
            if f"{prefix}.{attribute}" in source.names:
                module._buffers[attribute] = _to_loaded_dtype(source.tensor(f"{prefix}.{attribute}"))
