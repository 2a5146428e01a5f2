"""The layers of a model that `from_pretrained` reads, as a factory of a user's own, optionally with adapters of peft."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM

from sley_hf.decoder import layers_of
from sley_hf.structure import find_structure


def layers(path: str, lora_rank: int = 0) -> list[tuple[str, nn.Module]]:
    causal: Any = AutoModelForCausalLM.from_pretrained(path)
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        causal = get_peft_model(causal, LoraConfig(r=lora_rank, target_modules="all-linear")).get_base_model()
    return [(layer.name, layer.module) for layer in layers_of(causal, find_structure(causal)).build().layers]
