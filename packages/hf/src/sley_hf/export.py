"""Compares `hf.decoder` with transformers: its layers before a run, and its exported weights and logits after a run.

`train-cli check --model` compares a copy with fewer layers, fewer token ids and random weights, so models of any size are cheap
to compare. An export is compared by its tensors, and by the logits of one prompt.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
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
from sley_core.errors import PlanError, RunError
from sley_hf.decoder import build_from_config, build_routers, list_ties, read_hf_config, split_into_layers
from sley_hf.plugin import DecoderConfig
from sley_hf.structure import ModuleNames, to_layer_name
from sley_hf.weights import ExportedWeights

MAX_VOCAB_SIZE = 128
"""The maximum vocabulary size of the small copy that is compared before a run."""

PACKED_CU_SEQLENS = [[0, 16, 16], [0, 5, 16]]
"""The document bounds of two rows of 16 tokens, [b, n + 1]. The second row contains documents of 5 and 11 tokens."""

OUTPUT_TOLERANCE = 1e-4
"""The maximum difference in fp32 between the outputs of a model in Sley and in transformers: for logits, relative to the
largest absolute logit; for losses, relative to the expected loss.
"""

MAX_PROMPT_LENGTH = 16
"""The maximum number of tokens in the prompt with which an export is compared."""

EXPORT_TOLERANCE = 1e-5
"""The maximum difference in fp32 between hidden states or logits of the run and its export, relative to the largest value."""


@torch.no_grad()
def compare_with_transformers(config: DecoderConfig) -> str:
    """Compares a small copy of the model in Sley and in transformers, and returns a note with the largest relative difference.
    Raises PlanError "hf-differs" if a difference exceeds `OUTPUT_TOLERANCE`, and "hf-structure" or "hf-kernel" for an
    unsupported model.
    """
    hf_config = read_hf_config(config)
    small = shrink_config(hf_config, *build_from_config(hf_config, kernel="sdpa", experts="eager"))
    causal, structure = build_from_config(small, kernel="eager" if config.attention == "eager" else "sdpa", experts="eager")
    # In transformers, only the eager kernel applies soft caps.
    is_eager = config.attention == "eager" or getattr(small, "attn_logit_softcapping", None) or not causal._supports_sdpa
    kernel = "eager" if is_eager else "sdpa"
    reference = type(causal)._from_config(copy.deepcopy(small), attn_implementation=kernel).eval()
    routers = build_routers(config, causal, structure)
    model = share_parameters(split_into_layers(causal, structure, routers=routers), reference, structure)
    tokens = torch.arange(32).view(2, 16) * 7 % small.vocab_size
    differences = {}
    for bounds in ([[0, 16]] * 2, PACKED_CU_SEQLENS):
        expected = torch.stack(
            [_compute_document_logits(reference, row, row_bounds) for row, row_bounds in zip(tokens, bounds, strict=True)]
        )
        positions = torch.stack([torch.cat([torch.arange(e - s) for s, e in pairwise(row)]) for row in bounds])
        is_packed = bounds is PACKED_CU_SEQLENS
        actual = compute_logits(model, tokens, positions if is_packed else None, torch.tensor(bounds) if is_packed else None)
        kind = "the logits of packed documents" if is_packed else "the logits"
        differences[kind] = float((actual - expected).abs().max() / expected.abs().max())
    if routers is not None:
        expected = reference(input_ids=tokens, output_router_logits=True, use_cache=False).aux_loss
        differences["the load-balancing loss"] = abs(_compute_load_balancing_loss(model, tokens) / float(expected) - 1)
    for kind, difference in differences.items():
        if not difference <= OUTPUT_TOLERANCE:
            values = f"{kind} of `{small.model_type}`"
            message = f"the relative difference between Sley and transformers is {difference:.1%} for {values}"
            raise PlanError("hf-differs", message, path=("model",), hint="use a model of another family")
    largest = max(differences.values())
    return f"a copy with {small.num_hidden_layers} layers matches transformers to within {largest:.1g}"


def shrink_config(hf_config: Any, causal: Any, structure: ModuleNames) -> Any:
    """Returns a copy of `hf_config` with at most `MAX_VOCAB_SIZE` token ids, and the fewest layers, two or more, that include
    each kind of layer: each type, and each set of names and shapes of parameters. causal: the model of `hf_config`.
    """
    small = copy.deepcopy(hf_config)
    blocks = structure.list_blocks(causal)
    types = getattr(small, "layer_types", None) or [None] * len(blocks)
    kinds = [
        (kind, tuple((name, p.shape) for name, p in block.named_parameters()))
        for kind, block in zip(types, blocks, strict=True)
    ]
    num_layers = min(max(2, *(kinds.index(kind) + 1 for kind in set(kinds))), len(blocks))
    for name, value in list(vars(small).items()):
        if isinstance(value, list) and len(value) == small.num_hidden_layers:
            setattr(small, name, value[:num_layers])
    small.num_hidden_layers = num_layers
    small.vocab_size = min(MAX_VOCAB_SIZE, small.vocab_size)
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def share_parameters(model: Model, reference: Any, structure: Any) -> Model:
    """Builds the layers of `model` in evaluation mode with the parameters of the model `reference`, and returns `model`."""
    values = {to_layer_name(name, structure): p for name, p in reference.named_parameters(remove_duplicate=False)}
    for layer in model.build().layers:
        layer.module.eval()
        for path, _ in list(layer.module.named_parameters(remove_duplicate=False)):
            owner, _, attribute = path.rpartition(".")
            setattr(layer.module.get_submodule(owner), attribute, values.pop(f"{layer.name}.{path}"))
    assert not values, f"no layer has {sorted(values)}"
    return model


def compute_logits(model: Model, tokens: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the logits [b, s, v] of `tokens` [b, s]. positions: [b, s] or None. cu_seqlens: the bounds [b, n + 1] or None."""
    embed, *blocks, head = (layer.module for layer in model.layers)
    hidden = embed(tokens, positions)
    for block in blocks:
        hidden = block(hidden, positions, cu_seqlens)
    output: Tensor = head(hidden)
    return output


def _compute_load_balancing_loss(model: Model, tokens: Tensor) -> float:
    """Returns the load-balancing loss of `tokens` [b, s], without its coefficient."""
    for layer in model.layers:
        layer.module.training = True  # leaves submodules unchanged, since they may apply dropout
    output: Any = compute_logits(model, tokens)
    return float(output.balance.routers.compute_loss(*output.routed[1:]))


def _compute_document_logits(reference: Any, row: Tensor, bounds: list[int]) -> Tensor:
    """Returns the logits [s, v] of a row, computed separately for each document. bounds: the row's `cu_seqlens`."""
    documents = [row[None, start:end] for start, end in pairwise(bounds) if end > start]
    return torch.cat([reference(input_ids=ids, use_cache=False).logits[0] for ids in documents])


def build_hugging_face_model(plan: Plan, source: TensorReader) -> HuggingFaceModel:
    """Returns the plan's model in transformers' format: its description, and its weights, which are read from `source`. Raises
    RunError "weights-mismatch" if `source` does not have exactly the weights of this model.
    """
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
        f"{name!r} has the shape {list(source.info(name).shape)} and not {list(shapes[name])}"
        for name in names
        if not problems and source.info(name).shape != shapes[name]
    ]
    if problems:
        raise RunError("weights-mismatch", f"these are not the weights of the plan's model: {shorten_names(problems)}")
    content = hf_config.to_diff_dict() | {"architectures": [type(causal).__name__]}
    return replace(describe_model(content, names, plan, source), files=ExportedWeights(source, causal, names))


def check_export(plan: Plan, model: HuggingFaceModel, source: TensorReader, folder: Path) -> None:
    """Raises RunError "export-differs" unless the exported model in `folder` has the tensors of the run and computes the same
    logits. The message names the first tensor that differs, or the last layer with the same output. model: the description of
    the exported model, of which only the `names` are used. source: the weights of the run.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    causal: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    exported = causal.state_dict()
    for name, hf_name in model.names.items():
        if hf_name not in exported or not torch.equal(_to_loaded_dtype(source.tensor(name)), exported[hf_name]):
            raise _build_difference_error(folder, f"the tensor {hf_name!r} differs from {name!r} of the run")
    vocab_size = causal.config.vocab_size
    length = min(MAX_PROMPT_LENGTH, getattr(causal.config, "max_position_embeddings", None) or MAX_PROMPT_LENGTH)
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
        message = f"its logits differ from the logits of the run; the last layer with the same output is {last!r}"
        raise _build_difference_error(folder, message)


def _build_difference_error(folder: Path, message: str) -> RunError:
    return RunError("export-differs", f"the export in `{folder}` is wrong: {message}", hint="please report this as a bug")


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether no difference exceeds `EXPORT_TOLERANCE` times the largest expected value."""
    return bool((actual - expected).abs().max() <= EXPORT_TOLERANCE * expected.abs().max())


def _to_loaded_dtype(value: Tensor) -> Tensor:
    """Returns `value` in the dtype in which `check_export` loads it: fp32 for floating-point values, else unchanged."""
    return value.float() if value.is_floating_point() else value


def _compute_layer_outputs(plan: Plan, source: TensorReader, tokens: Tensor, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the fp32 output of each layer of the plan for `tokens` [1, s]. Only one layer is in memory."""
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
    """Sets a layer's parameters (in fp32) and buffers from `source`. ties: the name in `source` of each tied parameter."""
    for prefix, module in layer.named_modules(prefix=layer_name):
        for attribute in module._parameters:
            name = f"{prefix}.{attribute}"
            if module._parameters[attribute] is not None:
                value = source.tensor(ties.get(name, name)).float()
                module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        for attribute in module._buffers:
            if f"{prefix}.{attribute}" in source.names:
                module._buffers[attribute] = _to_loaded_dtype(source.tensor(f"{prefix}.{attribute}"))
