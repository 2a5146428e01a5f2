"""Somebody else's model as layers: transformers' own Llama blocks, trained through `[model] factory`.

    [model]
    factory = "hf_llama:layers"
    options = { num_layers = 2, hidden = 64, heads = 4, kv_heads = 2 }

Nothing of transformers is changed. Its blocks want rotary tables, so a small module around each computes them. Their
attention is Sley's small module, given through transformers' own interface for that: it knows where packed documents end,
and a plan with `[sequence]` finds it and makes it work on slices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from sley_core.api.data import DataInfo
from sley_core.api.model import Attention, Model


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [b, h, s, d] and so on; returns the context [b, s, h, d] and no weights.

    Of its other arguments the scale is the usual one, and there is no dropout in Llama's attention.
    """
    assert attention_mask is None, "the small attention is causal by itself"
    core: Any = module.get_submodule("core")
    return core(*(heads.transpose(1, 2) for heads in (query, key, value)), cu_seqlens=cu_seqlens), None


ATTENTION = "sley"
AttentionInterface.register(ATTENTION, attend)


class Embed(nn.Module):
    """[b, s] -> [b, s, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded


class Block(nn.Module):
    """A LlamaDecoderLayer as it is, with the attention that `attend` asks for: [b, s, hidden] -> [b, s, hidden]."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.rotary = LlamaRotaryEmbedding(config)
        self.block = LlamaDecoderLayer(config, index)
        self.block.self_attn.add_module("core", Attention())

    def forward(self, hidden: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        out: Tensor = self.block(hidden, position_embeddings=self.rotary(hidden, positions), cu_seqlens=cu_seqlens)
        return out


class Head(nn.Module):
    """The last norm and the logits: [b, s, hidden] -> [b, s, v]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def init_weights(module: nn.Module, name: str) -> None:
    """As LlamaPreTrainedModel does it; LlamaRMSNorm has no `reset_parameters`, so Sley has to be told."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, LlamaRMSNorm):
        nn.init.ones_(module.weight)


def layers(
    data: DataInfo, num_layers: int = 2, hidden: int = 64, heads: int = 4, kv_heads: int = 2, tie: bool = False
) -> Model:
    """The model, which Sley builds without memory for its weights and initialises afterwards."""
    settings: dict[str, Any] = {
        "vocab_size": data.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "attn_implementation": ATTENTION,
    }
    config = LlamaConfig(**settings)
    embed, head = Embed(config), Head(config)
    if tie:
        head.lm_head.weight = embed.embed_tokens.weight
    blocks = [(f"layers.{at}", Block(config, at)) for at in range(num_layers)]
    return Model([("embed", embed), *blocks, ("head", head)], init_weights=init_weights)
