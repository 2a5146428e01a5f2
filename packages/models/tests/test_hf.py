"""Tests Hugging Face's names of weights against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

from sley_core.errors import RunError
from sley_core.model.layers import Model
from sley_models.config import LlamaConfig
from sley_models.hf import HEAD, check_names, name_pairs
from sley_models.hf_config import to_hf_config
from sley_models.llama import build_llama
from sley_testing.plans import TOKENS
from sley_testing.plans import build_meta_model as build
from sley_testing.plans import build_model_with_values as real

VOCAB = 97


def config(tie: bool, kv_heads: int, head_dim: int = 8) -> LlamaConfig:
    return LlamaConfig(
        num_layers=2,
        hidden=32,
        heads=4,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tie_embeddings=tie,
        init_std=0.2,
        rope_theta=500.0,
    )


def state(model: Model) -> dict[str, Tensor]:
    return {f"{layer.name}.{name}": value for layer in model for name, value in layer.module.state_dict().items()}


def theirs(ours: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(TheirConfig(**to_hf_config(ours, VOCAB))).eval()


def logits(model: Model, tokens: Tensor) -> Tensor:
    output = model.layers[0].module(tokens)
    for layer in model.layers[1:]:
        output = layer.module(output)
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize(
    ("tie", "kv_heads", "head_dim"), [(False, 4, 8), (False, 2, 8), (True, 2, 8), (True, 1, 8), (False, 2, 16)]
)
def test_transformers_computes_the_same_logits(tie: bool, kv_heads: int, head_dim: int) -> None:
    ours = config(tie, kv_heads, head_dim)
    model = real(lambda data: build_llama(ours, data))
    other = theirs(ours)
    weights = state(model)
    renamed = {name: weights[own] for own, name in name_pairs(ours) if own in weights and not (tie and own == HEAD)}
    missing, unexpected = other.load_state_dict(renamed, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tie else [], [])
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits(model, tokens), other(tokens).logits, rtol=1e-5, atol=1e-5)


def test_weights_of_another_model_are_refused() -> None:
    ours = config(tie=False, kv_heads=2)
    weights = state(build(lambda data: build_llama(ours, data)))
    del weights["blocks.0.attention.key.weight"]
    with pytest.raises(RunError, match=r"'blocks.0.attention.key.weight' is missing, 'rope' is unknown") as raised:
        check_names([*weights, "rope"], dict(name_pairs(ours)), set())
    assert raised.value.diagnostics[0].code == "weights-mismatch"


def test_the_default_theta_is_exported() -> None:
    assert TOKENS.vocab_size == VOCAB
    rotary = theirs(config(tie=False, kv_heads=2)).model.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx([500.0 ** -(at / 4) for at in range(4)])
