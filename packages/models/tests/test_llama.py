"""Tests the layers, initial weights and computations of the reference decoder."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import PlanError
from sley_core.model import attention
from sley_core.model.layers import Model
from sley_models.llama import build_llama
from sley_models.plugin import LlamaConfig, compute_default_ffn_hidden
from sley_testing.plans import build_meta_model as build
from sley_testing.plans import build_model_with_values as real

SMALL = LlamaConfig(num_layers=2, hidden=32, heads=4, kv_heads=2)


def llama(config: LlamaConfig = SMALL) -> Callable[[DataInfo], Model]:
    return lambda data: build_llama(config, data)


def test_layers_their_fields_and_their_parameters() -> None:
    model = build(llama())
    assert [(layer.name, layer.fields) for layer in model] == [
        ("embed", ("tokens",)),
        ("blocks.0", ("positions", "cu_seqlens")),
        ("blocks.1", ("positions", "cu_seqlens")),
        ("head", ()),
    ]
    num_parameters = sum(parameter.numel() for layer in model for parameter in layer.module.parameters())
    attention_size, ffn_size = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 128
    assert num_parameters == 2 * 97 * 32 + 2 * (attention_size + ffn_size + 2 * 32) + 32


def test_initial_weights_have_the_deviation_of_the_config() -> None:
    config = LlamaConfig(num_layers=8, hidden=128, heads=4, init_std=0.1)
    block = real(llama(config))["blocks.3"].module
    for into_residual in (block.attention.output, block.feed_forward.down):
        assert into_residual.weight.std().item() == pytest.approx(0.1 / math.sqrt(16), rel=0.03)
    assert block.attention.query.weight.std().item() == pytest.approx(0.1, rel=0.03)
    assert torch.equal(block.attention_norm.weight, torch.ones(128))


@pytest.mark.parametrize("tie", [False, True])
def test_a_tied_head_is_the_embedding(tie: bool) -> None:
    model = real(llama(SMALL.model_copy(update={"tie_embeddings": tie})))
    assert (model["head"].module.output.weight is model["embed"].module.tokens.weight) == tie


def test_no_mask_is_built_without_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_compute_mask", lambda *_: pytest.fail("a mask where is_causal is enough"))
    output: Any = torch.zeros(2, 24, dtype=torch.int64)
    for layer in real(llama()):
        output = layer.module(output)


@pytest.mark.parametrize(
    ("wanted", "present", "message"),
    [
        (None, None, "does not declare its number of token ids"),
        (96, 97, "vocab_size must be at least 97, the number of token ids of the data, but is 96"),
    ],
)
def test_an_invalid_vocabulary_size_is_refused(wanted: int | None, present: int | None, message: str) -> None:
    config = LlamaConfig(num_layers=1, hidden=8, heads=1, vocab_size=wanted)
    with pytest.raises(PlanError, match=message) as raised:
        build_llama(config, DataInfo({"tokens": Field("int64")}, present))
    assert raised.value.diagnostics[0].code == "model-vocabulary"
    assert raised.value.diagnostics[0].path == ("model", "vocab_size")


# -- the configuration ---------------------------------------------------------------------------------------------------


def test_defaults_are_derived() -> None:
    config = LlamaConfig(num_layers=2, hidden=128, heads=4)
    assert (config.kv_heads, config.head_dim, config.ffn_hidden) == (4, 32, 384)
    assert LlamaConfig(**config.model_dump()) == config
    assert LlamaConfig.model_json_schema()["anyOf"][0] == {"required": ["weights"]}


@pytest.mark.parametrize(("hidden", "ffn_hidden"), [(24, 64), (25, 128), (128, 384), (768, 2048), (4096, 10944)])
def test_the_default_width_is_the_next_64_from_8_thirds(hidden: int, ffn_hidden: int) -> None:
    assert compute_default_ffn_hidden(hidden) == ffn_hidden


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"hidden": 130}, "head_dim", "hidden must be a multiple of heads, but hidden / heads = 130 / 4"),
        ({"kv_heads": 3}, "kv_heads", "heads / kv_heads = 4 / 3"),
        ({"kv_heads": 8}, "kv_heads", "heads / kv_heads = 4 / 8"),
        ({"hidden": 12}, "head_dim", "head_dim = hidden / heads = 12 / 4 must be even for rotary positions, but is 3"),
        ({"head_dim": 5}, "head_dim", "head_dim must be even for rotary positions, but is 5"),
    ],
)
def test_errors_of_sizes_show_the_equation(change: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        LlamaConfig(**{"num_layers": 2, "hidden": 128, "heads": 4, **change})
    errors = [error for error in raised.value.errors() if error["type"] != "default_factory_not_called"]
    assert [error["loc"] for error in errors] == [(key,)]
    assert message in errors[0]["msg"]
