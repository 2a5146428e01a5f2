"""The microbatch without values, by which layers are looked at, has the fields, shapes and types of the run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sley_core.data.batches import SequenceSlicer, collate_function
from sley_core.data.dataset import DataContext, DataInfo, Field
from sley_core.data.factory import open_dataset
from sley_core.model.layers import Layer
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan
from train_cli.meta_model import meta_micro_batch, meta_output, meta_state


class Rows:
    info = DataInfo({"tokens": Field("int64", sequence_dim=1), "labels": Field("int64", sequence_dim=1)}, sequence=24)

    def __init__(self, context: DataContext) -> None:
        pass

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.arange(24) + index, "labels": torch.arange(24)}


TEXT = {"use": "data.text", "source": "python-stdlib", "sequence": 12}


def forms(batch: Any) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (value.dtype, list(value.shape)) for name, value in batch.items()}


@pytest.mark.parametrize("sp", [1, 3])
@pytest.mark.parametrize("documents", ["cut", "pack", "pad", None])
def test_it_is_like_the_run_s(documents, sp):
    """Boundaries of documents are as many as there are: here those of one, and never one per position."""
    data = TEXT | {"documents": documents} if documents else {"factory": "test_on_meta:Rows"}
    plan = plan_from_dict(small_plan(batch__micro_size=2, data=data), Path(__file__).parent)
    plan = replace(plan, parallel=plan.parallel.model_copy(update={"sp": sp}))
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    made: Any = dataset
    whole = collate_function(dataset)([made[0], made[1]])
    wanted = forms(SequenceSlicer(dataset.info.fields, sp, 0)(whole))
    batch = meta_micro_batch(plan, dataset)
    assert all(value.is_meta for value in batch.values())
    found = forms(batch)
    if "cu_seqlens" in wanted:
        assert found.pop("cu_seqlens") == (torch.int32, [2, 2])
        dtype, (size, _) = wanted.pop("cu_seqlens")
        assert (dtype, size) == (torch.int32, 2)
    assert found == wanted


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("angles", torch.ones(3))
        self.register_buffer("table", torch.ones(3, dtype=torch.int64))

    def forward(self, x, shift):
        assert self.table.dtype == torch.int64
        return x * self.scale * self.angles + shift + torch.zeros(3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_is_called_with_the_types_that_a_run_gives_it(dtype):
    """Buffers are widened and never narrowed, as when a rank gives them memory."""
    layer = Layer("one", Buffered(), fields=("shift",))
    given = torch.empty(2, 3, dtype=dtype, device="meta")
    found = meta_output(layer, (given,), {"shift": given, "another": given}, meta_state(layer, dtype))
    assert found.is_meta
    assert found.shape == (2, 3)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
