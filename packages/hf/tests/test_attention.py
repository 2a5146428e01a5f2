"""The kernels of `[model] attention` compute what matrix products compute, or are refused."""

from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import hf_families
import pytest
import torch
from hf_families import small_config
from torch import Tensor

from sley_core.api.data import DataInfo, Field
from sley_core.errors import PlanError, RunError
from sley_hf.plugin import DecoderConfig


def draw_heads() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 24, heads, 16, generator=generator) for heads in (4, 2, 2)]


def attend_per_document(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, longest: int, longest_key: int, **options: Any
) -> tuple[Tensor, None]:
    """Computes documents one by one, as flash-attn describes its `flash_attn_varlen_func`."""
    assert options["causal"]
    assert torch.equal(bounds, key_bounds)
    assert longest == longest_key >= int(bounds.diff().max())
    assert bounds.dtype == torch.int32
    left, right = options["window_size"]
    assert right == 0
    eager = hf_families.SleyAttention("eager")
    scale, window, softcap = options["softmax_scale"], None if left < 0 else left + 1, options["softcap"] or None
    contexts = [
        eager(q[None, start:end], k[None, start:end], v[None, start:end], None, scale, window, 0.0, softcap)[0]
        for start, end in pairwise(bounds.tolist())
        if end > start
    ]
    return torch.cat(contexts), None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("bounds", [None, [[0, 7, 24, 24], [0, 5, 12, 24]]])
def test_kernels_compute_packed_documents_windows_and_caps(bounds: Any, window: int | None, softcap: float | None) -> None:
    q, k, v = draw_heads()
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    expected = hf_families.SleyAttention("eager")(q, k, v, cu_seqlens, 0.3, window, 0.0, softcap)
    flex = hf_families.SleyAttention("flex_attention")(q, k, v, cu_seqlens, 0.3, window, 0.0, softcap)
    torch.testing.assert_close(flex, expected, rtol=1e-5, atol=1e-5)
    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = attend_per_document
    flash = hf_families.call_flash(module, q, k, v, cu_seqlens, 0.3, window, 0.0, softcap)
    torch.testing.assert_close(flash, expected, rtol=1e-5, atol=1e-5)


def test_what_a_kernel_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    q, k, v = draw_heads()

    def refusal_message(kernel: str, q: Tensor = q, dropout: float = 0.0) -> str:
        with pytest.raises(RunError) as error:
            hf_families.SleyAttention(kernel)(q, k, v, dropout=dropout)
        assert error.value.diagnostics[0].hint == 'set `[model] attention = "auto"`'
        return error.value.diagnostics[0].message

    assert refusal_message("flex_attention", q.requires_grad_()) == "`flex_attention` has no backward on cpu"
    assert refusal_message("flash_attention_3", dropout=0.1) == "`flash_attention_3` has no dropout"
    monkeypatch.setattr("sley_hf.attention.find_spec", lambda name: None)
    assert "needs the module `flash_attn_interface`" in refusal_message("flash_attention_3")
    monkeypatch.setattr("sley_hf.attention.find_spec", lambda name: ModuleSpec(name, None))
    assert refusal_message("flash_attention_2").endswith("but not in torch.float32 on cpu")
    small_config("falcon").save_pretrained(tmp_path)
    config = DecoderConfig.model_validate({"config": tmp_path, "attention": "flex_attention"})
    with pytest.raises(PlanError, match="`falcon` computes attention with its own code, which has no `flex_attention`"):
        hf_families.build_layers(config, DataInfo({"tokens": Field("int64"), "labels": Field("int64")}, vocab_size=256))
