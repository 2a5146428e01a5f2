from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sley_models.config import LlamaConfig, default_ffn_hidden


def test_what_is_left_out_is_derived() -> None:
    config = LlamaConfig(num_layers=2, hidden=128, heads=4)
    assert (config.kv_heads, config.head_dim, config.ffn_hidden) == (4, 32, 384)
    assert LlamaConfig(**config.model_dump()) == config


@pytest.mark.parametrize(("hidden", "ffn_hidden"), [(24, 64), (25, 128), (128, 384), (768, 2048), (4096, 10944)])
def test_the_default_width_is_the_next_64_from_8_thirds(hidden: int, ffn_hidden: int) -> None:
    assert default_ffn_hidden(hidden) == ffn_hidden


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"hidden": 130}, "head_dim", "hidden / heads = 130 / 4 is not a whole number"),
        ({"kv_heads": 3}, "kv_heads", "heads / kv_heads = 4 / 3 is not a whole number"),
        ({"kv_heads": 8}, "kv_heads", "heads / kv_heads = 4 / 8 is not a whole number"),
        ({"hidden": 12}, "head_dim", "head_dim = hidden / heads = 12 / 4 = 3 is odd"),
        ({"head_dim": 5}, "head_dim", "head_dim = 5 is odd"),
        ({"num_layers": 0}, "num_layers", "greater than or equal to 1"),
        ({"rope_theta": 0.0}, "rope_theta", "greater than 0"),
    ],
)
def test_sizes_that_do_not_fit_are_told_with_the_equation(change: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ValidationError) as raised:
        LlamaConfig(**{"num_layers": 2, "hidden": 128, "heads": 4, **change})
    told = [error for error in raised.value.errors() if error["type"] != "default_factory_not_called"]
    assert [error["loc"] for error in told] == [(key,)]
    assert says in told[0]["msg"]
