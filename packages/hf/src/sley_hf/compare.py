"""Compares the layers of `hf.decoder` with transformers' own forward, for `train-cli check --model`.

The comparison uses a copy of the model with fewer layers, fewer token ids and random weights, so a model of any size is cheap
to compare.
"""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sley_core.api.model import Model
from sley_core.errors import PlanError
from sley_hf.decoder import build_from_config, build_routers, cut_into_layers, read_hf_config
from sley_hf.plugin import DecoderConfig
from sley_hf.structure import ModuleNames, to_layer_name

MAX_IDS = 128
"""The maximum vocabulary size of the copy."""

BOUNDS = [[0, 16, 16], [0, 5, 16]]
"""The document bounds (`cu_seqlens`) of two rows of 16 tokens. The second row contains two documents."""

TOLERANCE = 1e-4
"""The maximum difference of logits relative to the largest logit, and the maximum relative difference of losses."""


@torch.no_grad()
def compare_with_transformers(config: DecoderConfig) -> str:
    """Returns a note with the largest relative difference between the results of Sley and of transformers. Raises PlanError
    "hf-differs" if it exceeds `TOLERANCE`, and "hf-structure" or "hf-kernel" if the model is not supported.
    """
    hf_config = read_hf_config(config)
    small = shrink_config(hf_config, *build_from_config(hf_config, kernel="sdpa", experts="eager"))
    causal, structure = build_from_config(small, kernel="eager" if config.attention == "eager" else "sdpa", experts="eager")
    # In transformers, only the eager kernel applies soft caps.
    is_eager = config.attention == "eager" or getattr(small, "attn_logit_softcapping", None) or not causal._supports_sdpa
    kernel = "eager" if is_eager else "sdpa"
    reference = type(causal)._from_config(copy.deepcopy(small), attn_implementation=kernel).eval()
    routers = build_routers(config, causal, structure)
    model = share_parameters(cut_into_layers(causal, structure, routers=routers), reference, structure)
    tokens = torch.arange(32).view(2, 16) * 7 % small.vocab_size
    differences = {}
    for bounds in ([[0, 16]] * 2, BOUNDS):
        expected = torch.stack(
            [_compute_document_logits(reference, row, row_bounds) for row, row_bounds in zip(tokens, bounds, strict=True)]
        )
        positions = torch.stack([torch.cat([torch.arange(e - s) for s, e in pairwise(row)]) for row in bounds])
        is_packed = bounds is BOUNDS
        actual = compute_logits(model, tokens, positions if is_packed else None, torch.tensor(bounds) if is_packed else None)
        kind = "the logits of packed documents" if is_packed else "the logits"
        differences[kind] = float((actual - expected).abs().max() / expected.abs().max())
    if routers is not None:
        expected = reference(input_ids=tokens, output_router_logits=True, use_cache=False).aux_loss
        differences["the load-balancing loss"] = abs(_compute_load_balancing_loss(model, tokens) / float(expected) - 1)
    for kind, difference in differences.items():
        if not difference <= TOLERANCE:
            message = f"{kind} of `{small.model_type}` and transformers' differ by {difference:.1g}"
            raise PlanError("hf-differs", message, path=("model",), hint="this family is not supported")
    largest = max(differences.values())
    return f"the logits of a copy with {small.num_hidden_layers} layers equal transformers' within {largest:.1g}"


def shrink_config(hf_config: Any, causal: Any, structure: ModuleNames) -> Any:
    """Returns a config with at most `MAX_IDS` token ids, and the fewest layers, but two if possible, that include each kind of
    layer. causal: the model of `hf_config`. Layers of one kind have the same type, and parameters of the same names and shapes.
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
    small.vocab_size = min(MAX_IDS, small.vocab_size)
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def share_parameters(model: Model, reference: Any, structure: Any) -> Model:
    """Builds the layers of `model` in evaluation mode with the parameters of the model `reference`. Returns `model`."""
    values = {to_layer_name(name, structure): p for name, p in reference.named_parameters(remove_duplicate=False)}
    for layer in model.build().layers:
        layer.module.eval()
        for path, _ in list(layer.module.named_parameters(remove_duplicate=False)):
            owner, _, attribute = path.rpartition(".")
            setattr(layer.module.get_submodule(owner), attribute, values.pop(f"{layer.name}.{path}"))
    assert not values, f"no layer has {sorted(values)}"
    return model


def compute_logits(model: Model, tokens: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the logits [b, s, v] of `tokens` [b, s]. positions: [b, s]. cu_seqlens: [b, n + 1], as in `Attention`."""
    embed, *blocks, head = (layer.module for layer in model.layers)
    hidden = embed(tokens, positions)
    for block in blocks:
        hidden = block(hidden, positions, cu_seqlens)
    output: Tensor = head(hidden)
    return output


def _compute_load_balancing_loss(model: Model, tokens: Tensor) -> float:
    for layer in model.layers:
        layer.module.training = True  # but not for its submodules, which may apply dropout
    output: Any = compute_logits(model, tokens)
    return float(output.balance.routers.compute_loss(*output.routed[1:]))


def _compute_document_logits(reference: Any, row: Tensor, bounds: list[int]) -> Tensor:
    """Returns the logits [s, v] of a row, computed separately for each document. bounds: the row's `cu_seqlens`."""
    return torch.cat(
        [reference(input_ids=row[None, start:end], use_cache=False).logits[0] for start, end in pairwise(bounds) if end > start]
    )
