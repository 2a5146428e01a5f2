"""Data as a plan names it: built, checked with places, and written back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sley_core.data.dataset import DataContext, Field
from sley_core.data.factory import open_dataset, samples_per_epoch
from sley_core.data.feed import Feed
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_text, with_values
from sley_core.plan.plan import Plan
from sley_data.datasets import TextDataset

REST = """\
plan = 1
[run]
name = "data"
steps = 2
[model]
use = "models.llama"
num_layers = 1
hidden = 8
heads = 1
[optimizer]
use = "core.adamw"
lr = 0.1
[batch]
global_size = 2
micro_size = 1
"""

MODULE = """\
import torch

class Numbers:
    def __init__(self, start, context=None):
        self.start = start + (context is not None and context.split == "held_out") * 100

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"tokens": torch.tensor([self.start + index])}

def without_context(start):
    return Numbers(start)

def nothing():
    return None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_numbers.py").write_text(MODULE)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_bytes(bytes(range(20)))
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("my_numbers", None)


def a_plan(folder: Path, data: str) -> Plan:
    return plan_from_text(REST + data, folder=folder)


def test_a_record_is_built_from_its_table(folder: Path) -> None:
    plan = a_plan(folder, '[data]\nuse = "data.text"\nfiles = ["corpus/*.txt"]\nsequence = 4\nheld_out = 0.0\n')
    dataset = open_dataset(plan.data, DataContext())
    assert isinstance(dataset, TextDataset)
    assert len(dataset) == 5
    assert check_plan(plan, 1) == []
    assert plan_from_text(plan.to_toml(), folder=folder) == plan


def test_what_is_wrong_with_the_data_has_its_place(folder: Path) -> None:
    data = '[data]\nuse = "data.text"\nfiles = [\n  "corpus/*.txt",\n  "corpus/none.txt",\n]\nsequence = 4\n'
    problems = check_plan(a_plan(folder, data), 1)
    assert [problem.code for problem in problems] == ["data-missing"]
    assert problems[0].place is not None
    assert problems[0].place.line == len(REST.splitlines()) + 5


def test_a_plan_is_pinned_to_its_number_of_samples(folder: Path) -> None:
    plan = a_plan(folder, '[data]\nuse = "data.text"\nfiles = ["corpus/*.txt"]\nsequence = 4\nheld_out = 0.0\n')
    count = samples_per_epoch(open_dataset(plan.data, DataContext()), plan.data.config)
    pinned = plan_from_text(with_values(plan, {("data", "samples_per_epoch"): count}).to_toml(), folder=folder)
    assert pinned.data.config.samples_per_epoch == 5
    assert check_plan(pinned, 1) == []
    (folder / "corpus/b.txt").write_bytes(b"more text")
    assert [problem.code for problem in check_plan(pinned, 1)] == ["data-changed"]


FACTORY = """\
[data]
factory = "my_numbers:Numbers"
options = { start = 7 }
vocab_size = 300
fields = { tokens = { dtype = "int64", sequence_dim = 1, ids = "token" } }
"""


def test_a_factory_is_built_declared_and_written_back(folder: Path) -> None:
    plan = a_plan(folder, FACTORY)
    assert plan_from_text(plan.to_toml(), folder=folder) == plan
    dataset = open_dataset(plan.data, DataContext())
    assert dataset.info.fields == {"tokens": Field("int64", 0, 1, ids="token")}
    assert dataset.info.vocab_size == 300
    with Feed(dataset, seed=0, batch_size=3, rows=range(3), shuffle=False) as feed:
        assert torch.equal(feed.next()["tokens"], torch.tensor([[7], [8], [9]]))


def test_a_factory_that_takes_context_has_both_splits(folder: Path) -> None:
    dataset = open_dataset(a_plan(folder, FACTORY).data, DataContext(split="held_out"))
    with Feed(dataset, seed=0, batch_size=1, rows=range(1), shuffle=False) as feed:
        assert feed.next()["tokens"].item() == 107


def test_a_factory_that_does_not_has_nothing_held_out(folder: Path) -> None:
    plan = a_plan(folder, '[data]\nfactory = "my_numbers:without_context"\noptions = { start = 7 }\n')
    assert len(open_dataset(plan.data, DataContext())) == 3
    with pytest.raises(PlanError, match="does not take `context`") as caught:
        open_dataset(plan.data, DataContext(split="held_out"))
    assert caught.value.diagnostics[0].code == "held-out"


def test_a_factory_that_gives_no_dataset_has_its_place(folder: Path) -> None:
    plan = a_plan(folder, '[data]\nfactory = "my_numbers:nothing"\n')
    with pytest.raises(PlanError, match="gave a NoneType") as caught:
        open_dataset(plan.data, DataContext())
    assert plan.located(caught.value).diagnostics[0].place is not None
