"""Fine-tunes somebody else's weights: a causal language model of transformers, read from its files and cut into layers.

    [model]
    factory = "hf_pretrained:layers"
    options = { path = "/models/Qwen2-0.5B", lora_rank = 8 }

It is read as everywhere, by `from_pretrained`. A run starts from what is in the files, in every layout, and a rank reads what
it owns: weights stay in their files until the layers that need them get their memory. Llama, Qwen2 and GPT-NeoX are cut
here; others differ in the names of their parts. With `lora_rank`, peft freezes the model and adds adapters.
"""

from __future__ import annotations

from typing import Any

import hf_llama  # makes the attention "sley" known to transformers
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sley_core.api.model import Attention

PARTS = {
    "gpt_neox": ("gpt_neox", "final_layer_norm", "attention"),
    "llama": ("model", "norm", "self_attn"),
    "qwen2": ("model", "norm", "self_attn"),
}
"""By the type of a model: its body, the last norm there, and the attention of a block."""


class Embed(nn.Module):
    """[b, s] -> [b, s, hidden]."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.table(tokens)
        return embedded


class Block(nn.Module):
    """One block as it is, with the rotary tables that it wants: [b, s, hidden] -> [b, s, hidden]."""

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary

    def forward(self, hidden: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        tables = self.rotary(hidden, positions)
        out: Any = self.block(hidden, attention_mask=None, position_embeddings=tables, cu_seqlens=cu_seqlens)
        return out[0] if isinstance(out, tuple) else out


class Head(nn.Module):
    """The last norm and the logits: [b, s, hidden] -> [b, s, v]."""

    def __init__(self, norm: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.output = output

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(hidden))
        return logits


def layers(path: str, lora_rank: int = 0) -> list[tuple[str, nn.Module]]:
    """The layers `embed`, `blocks.0` ... and `head` of the model in the folder `path`."""
    whole: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation=hf_llama.ATTENTION)
    body, norm, attention = PARTS[whole.config.model_type]
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        whole = get_peft_model(whole, LoraConfig(r=lora_rank, target_modules="all-linear")).get_base_model()
    parts: Any = getattr(whole, body)
    for block in parts.layers:
        getattr(block, attention).add_module("core", Attention())
    blocks = [(f"blocks.{at}", Block(block, parts.rotary_emb)) for at, block in enumerate(parts.layers)]
    head = Head(getattr(parts, norm), whole.get_output_embeddings())
    return [("embed", Embed(whole.get_input_embeddings())), *blocks, ("head", head)]
