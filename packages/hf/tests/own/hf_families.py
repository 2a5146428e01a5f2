"""Small random configs of the families that packages/hf/README.md lists, their models, and layouts of two ranks."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from sley_testing.plans import Tables
from sley_testing.runs import RunRecord, record

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 255,
}
GEMMA = {"head_dim": 16, "sliding_window": 5}
MOE = {"num_experts": 4, "num_experts_per_tok": 2}
NO_DROPOUT = dict.fromkeys(
    ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "embedding_dropout", "residual_dropout"),
    0.0,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {},
    "stablelm": {},
    "cohere": {},
    "cohere2": {},
    "gpt_neox": {},
    "gpt2": {},
    "gptj": {"rotary_dim": 8},
    "starcoder2": {"sliding_window": 5},
    "falcon": {},
    "opt": {"word_embed_proj_dim": 64, "dropout": 0.0},
    "mpt": {},
    "glm4": {},
    "nemotron": {},
    "helium": {"head_dim": 16},
    "exaone4": {},
    "ernie4_5": {},
    "seed_oss": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": MOE | {"moe_intermediate_size": 32},
    "qwen2_moe": MOE | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "flex_olmo": MOE,
    "mellum": MOE | {"moe_intermediate_size": 32},
    "olmoe": MOE,
}
"""The keys by which a config differs from `SIZES`, by `model_type`."""


LAYOUTS: dict[str, Tables] = {
    "dp bucketed": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed", "bucket_mb": 0.001}]},
    "dp sharded": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.001}]},
    "1f1b": {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}},
    "zb_h1": {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.zero_bubble_h1"}},
    "wp": {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}},
    "sp": {"parallel": {"dp": 1, "sp": 2}, "sequence": {"use": "isp.all_to_all"}},
    "recompute": {"parallel": {"dp": 2}, "activations": {"use": "core.recompute", "fraction": 1.0}},
    "host": {"parallel": {"dp": 2}, "activations": {"use": "memory.host"}, "offload": [{"use": "memory.everything"}]},
}


def __getattr__(name: str) -> Any:
    """Returns a name of these modules, which import transformers: seconds that a process that only collects tests need not
    wait.
    """
    for module in ("sley_hf.attention", "sley_hf.decoder", "sley_hf.export", "transformers"):
        if not name.startswith("_") and hasattr(import_module(module), name):
            return getattr(import_module(module), name)
    raise AttributeError(name)


def small_config(family: str, **changes: Any) -> Any:
    """Returns a transformers config with two small layers and no dropout."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**SIZES, **NO_DROPOUT, **FAMILIES.get(family, {}), **changes})


def computes_in_fp32(config: Any) -> bool:
    """Returns whether parts of the model compute in fp32, whatever the dtype of its weights."""
    return config.model_type.startswith(("gemma", "cohere", "helium", "mpt"))


def record_plans(
    ranks: Any, plans: Sequence[Tables], num_steps: int, folder: Path, batches: Any = None
) -> Iterator[tuple[RunRecord, ...]]:
    """Records several plans one after another on the same ranks, since each new rank imports transformers. Yields the records
    of all ranks for each plan.
    """
    return zip(*ranks(record_on_rank, plans, num_steps, folder, batches), strict=True)


def record_on_rank(plans: Sequence[Tables], num_steps: int, folder: Path, batches: Any) -> list[RunRecord]:
    return [record(tables, num_steps, folder=folder, batches=batches) for tables in plans]


def has_experts(config: Any) -> bool:
    return hasattr(config, "num_experts_per_tok")


def transformers_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    needs_eager = getattr(config, "attn_logit_softcapping", None) or config.model_type == "mpt"
    options: dict[str, Any] = {"attn_implementation": "eager" if needs_eager else "sdpa"}
    if has_experts(config):
        options["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_config(config, **options).double()
