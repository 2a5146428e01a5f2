"""Optimizers that read whole matrices have the same update in every layout, as in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from layouts import LAYOUTS, layout_of, num_ranks

from sley_testing.plans import small_plan
from sley_testing.runs import assert_parity_of_parts, record, record_reference

ORTHOGONAL = {"factory": "matrix_optimizers:Orthogonal", "scope": "matrix", "lr": 0.02, "weight_decay": 0.1, "clip_norm": 1.0}
PLAN = small_plan(
    model__ffn_hidden=27,
    model__vocab_size=257,
    model__tie_embeddings=True,
    data__sequence=16,
    batch__micro_size=1,
    optimizer=ORTHOGONAL,
    learning_rate={"use": "core.cosine"},
)
"""257 tokens and 27 channels are no multiples of a number of ranks, so shards are padded."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ["dp2 sharded", "wp2", "pp2 dp2 sharded", "wp2 wdp2 sharded", *LAYOUTS])
def test_layouts_have_the_update_of_one_process(ranks: Any, texts: Path, layout: str) -> None:
    tables = layout_of(layout, PLAN)
    assert_parity_of_parts(
        record_reference(PLAN, 3, folder=texts), ranks(num_ranks(tables))(record, tables, 3, folder=texts), "fp64"
    )
