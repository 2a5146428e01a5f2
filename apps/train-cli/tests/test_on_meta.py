"""The microbatch on meta has the fields, shapes and types of a run's microbatch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.data.batches import SequenceSlicer, collate_function
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan
from train_cli.meta_model import meta_micro_batch

TEXT = small_plan(data__sequence=12)["data"]


def formats(batch: Any) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (value.dtype, list(value.shape)) for name, value in batch.items()}


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("documents", ["cut", "pack", "pad", None])
def test_a_meta_batch_equals_the_batch_of_a_run(texts: Path, documents: str | None, sp: int) -> None:
    """The boundaries on meta are those of one document."""
    data = TEXT | {"documents": documents} if documents else {"factory": "drawn_model:Rows"}
    plan = plan_from_dict(small_plan(batch__micro_size=2, data=data), texts)
    plan = replace(plan, parallel=plan.parallel.model_copy(update={"sp": sp}))
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    indexed: Any = dataset
    full = collate_function(dataset)([indexed[0], indexed[1]])
    expected = formats(SequenceSlicer(dataset.info.fields, sp, 0)(full))
    batch = meta_micro_batch(plan, dataset)
    assert all(value.is_meta for value in batch.values())
    actual = formats(batch)
    if "cu_seqlens" in expected:
        assert actual.pop("cu_seqlens") == (torch.int32, [2, 2])
        dtype, (size, _) = expected.pop("cu_seqlens")
        assert (dtype, size) == (torch.int32, 2)
    assert actual == expected
