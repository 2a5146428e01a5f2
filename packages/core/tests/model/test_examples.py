"""The two example models that are not ours, as a run would build them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sley_core.data.dataset import DataInfo
from sley_core.model.layers import Model

pytestmark = pytest.mark.usefixtures("examples")
Real = Callable[..., Model]


def factory(name: str, **options: Any) -> Callable[[DataInfo], Any]:
    return lambda data: import_module(name).layers(data=data, **options)


def forward(model: Model, **fields: Tensor) -> Any:
    output: Any = None
    for at, layer in enumerate(model):
        named = {name: fields[name] for name in layer.fields if name in fields}
        output = layer.module(*((output,) if at else ()), **named)
    return output


TOKENS = torch.randint(0, 97, (3, 24), generator=torch.Generator().manual_seed(5))
ALL = pytest.mark.parametrize(
    ("name", "options"), [("hf_llama", {}), ("hf_llama", {"tie": True}), ("conv_tie", {"hidden": 16, "num_blocks": 2})]
)


@ALL
def test_it_is_built_on_meta_and_has_a_gradient_everywhere(build: Real, real: Real, name: str, options: Any) -> None:
    drafted = build(factory(name, **options))
    assert all(parameter.is_meta for layer in drafted for parameter in layer.module.parameters())
    assert not any(buffer.is_meta for layer in drafted for buffer in layer.module.buffers())
    model = real(factory(name, **options), torch.float64)
    assert forward(model, tokens=TOKENS).shape == (3, 24, 97)
    forward(model, tokens=TOKENS).square().sum().backward()
    for layer in model:
        for parameter in layer.module.parameters():
            assert parameter.dtype == torch.float64
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()


@ALL
def test_a_rank_with_one_layer_has_the_values_of_the_whole(real: Real, name: str, options: Any) -> None:
    whole = real(factory(name, **options))
    for layer in whole:
        part = real(factory(name, **options), owned={layer.name})[layer.name].module
        for (key, one), other in zip(layer.module.named_parameters(), part.parameters(), strict=True):
            assert torch.equal(one, other), (layer.name, key)


def test_transformers_blocks_give_transformers_logits(real: Real) -> None:
    model = real(factory("hf_llama", num_layers=3))
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    whole = LlamaForCausalLM(config).eval()
    names = {"embed.": "model.", "layers.": "model.layers.", "head.norm.": "model.norm.", "head.lm_head.": "lm_head."}
    weights = {}
    for layer in model:
        for key, value in layer.module.state_dict().items():
            name = f"{layer.name}.{key}".replace(".block.", ".")
            ours, theirs = next((ours, theirs) for ours, theirs in names.items() if name.startswith(ours))
            weights[name.replace(ours, theirs, 1)] = value
    whole.load_state_dict(weights, strict=True)
    with torch.no_grad():
        ours = forward(model, tokens=TOKENS)
        torch.testing.assert_close(ours, whole(TOKENS).logits, rtol=1e-5, atol=1e-5)
        moved = TOKENS.new_tensor(range(5, 29)).expand(3, -1)
        given = forward(model, tokens=TOKENS, positions=moved)
        torch.testing.assert_close(given, whole(TOKENS, position_ids=moved).logits, rtol=1e-5, atol=1e-5)
