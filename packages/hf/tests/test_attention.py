"""The kernels of `[model] attention` compute what matrix products compute, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import small_config
from torch import Tensor

from sley_core.api.data import DataInfo, Field
from sley_core.errors import PlanError, RunError
from sley_hf.attention import SleyAttention
from sley_hf.decoder import layers
from sley_hf.plugin import DecoderConfig


def draw_heads() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 24, heads, 16, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("bounds", [None, [[0, 7, 24, 24], [0, 5, 12, 24]]])
def test_flex_attention_computes_packed_documents_windows_and_caps(
    bounds: Any, window: int | None, softcap: float | None
) -> None:
    q, k, v = draw_heads()
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    expected = SleyAttention("eager")(q, k, v, cu_seqlens, 0.3, window, 0.0, softcap)
    flex = SleyAttention("flex_attention")(q, k, v, cu_seqlens, 0.3, window, 0.0, softcap)
    torch.testing.assert_close(flex, expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_lacks_a_feature_is_refused(tmp_path: Path) -> None:
    q, k, v = draw_heads()
    with pytest.raises(RunError, match="`flex_attention` has no dropout"):
        SleyAttention("flex_attention")(q, k, v, dropout=0.1)
    with pytest.raises(RunError, match="`flex_attention` has no backward on cpu"):
        SleyAttention("flex_attention")(q.requires_grad_(), k, v)
    small_config("falcon").save_pretrained(tmp_path)
    config = DecoderConfig.model_validate({"config": tmp_path, "attention": "flex_attention"})
    with pytest.raises(PlanError, match="`falcon` computes attention with its own code, which has no `flex_attention`"):
        layers(config, DataInfo({"tokens": Field("int64"), "labels": Field("int64")}, vocab_size=256))
