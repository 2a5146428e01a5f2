"""Data as a plan names it: built, checked with places, and written back."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from sley_core.data.batches import count_samples_per_epoch, open_dataset, wrap_dataset
from sley_core.data.dataset import TOKEN_FIELDS, DataConfig, DataContext, DataInfo, FactoryDataConfig, Field, FieldConfig
from sley_core.data.feed import Feed
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_text, replace_values
from sley_core.plan.plan import Plan
from sley_testing.plans import small_plan

NOTHING = FactoryDataConfig()


class Ours(TorchDataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": torch.full((2, 3), float(index)), "label": torch.tensor(index)}


class OurStream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter({"x": torch.tensor([number, number])} for number in range(3))


INFERRED = {"image": Field("float32"), "label": Field("int64")}


def test_fields_are_inferred_from_the_first_sample() -> None:
    assert wrap_dataset(Ours(), NOTHING, "my:Ours").info == DataInfo(INFERRED)
    assert wrap_dataset(OurStream(), NOTHING, "my:OurStream").info == DataInfo({"x": Field("int64")})


@pytest.mark.parametrize("collates", [False, True])
@pytest.mark.parametrize(
    ("sample", "are_ids"),
    [
        ({"tokens": torch.arange(5), "labels": torch.arange(5)}, True),
        ({"labels": torch.arange(5), "tokens": torch.arange(5)}, True),
        ({"tokens": torch.arange(5), "labels": torch.tensor(1)}, False),
        ({"tokens": torch.arange(5).int(), "labels": torch.arange(5).int()}, False),
        ({"tokens": torch.arange(5), "labels": torch.arange(5.0)}, False),
        ({"tokens": torch.arange(5), "labels": torch.arange(5), "mask": torch.arange(5)}, False),
        ({"tokens": torch.arange(5)}, False),
    ],
)
def test_tokens_and_labels_of_one_length_are_token_ids(sample: dict[str, Tensor], are_ids: bool, collates: bool) -> None:
    class Chats(list[dict[str, Tensor]]):
        pass

    if collates:
        Chats.collate = lambda self, samples: torch.utils.data.default_collate(samples)  # type: ignore[attr-defined]
    fields = wrap_dataset(Chats([sample]), NOTHING, "my:Chats").info.fields
    assert (fields == TOKEN_FIELDS) == are_ids
    assert are_ids or all(field.sequence_dim is None and field.ids is None for field in fields.values())


def test_the_plan_comes_before_the_datasets_own_info() -> None:
    class Declares(Ours):
        info = DataInfo(INFERRED, vocab_size=10, sequence=7)

    fields = {"image": FieldConfig(dtype="float32", sequence_dim=1), "label": FieldConfig(dtype="int64", ids="label")}
    config = FactoryDataConfig(fields=fields, vocab_size=20)
    info = wrap_dataset(Declares(), config, "my:Declares").info
    assert info.fields == {"image": Field("float32", 0, 1), "label": Field("int64", ids="label")}
    assert (info.vocab_size, info.sequence) == (20, 7)


def test_torchs_datasets_and_streams_are_fed() -> None:
    with Feed(wrap_dataset(Ours(), NOTHING, "my:Ours"), seed=0, batch_size=4, rows=range(4)) as feed:
        batch = feed.next()
    assert batch["image"].shape == (4, 2, 3)
    assert sorted(batch["label"].tolist()) == [0, 1, 2, 3]
    with Feed(wrap_dataset(OurStream(), NOTHING, "my:OurStream"), seed=0, batch_size=4, rows=range(2, 4)) as feed:
        assert feed.next()["x"].tolist() == [[2, 2], [0, 0]]
        assert feed.next()["x"].tolist() == [[0, 0], [1, 1]]


class Fails(Ours):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (7, "returned a int, which is not a dataset"),
        (None, "returned a NoneType, which is not a dataset"),
        (({"x": torch.zeros(1)} for _ in range(3)), "returned a generator, which can be iterated only once"),
        (TensorDataset(torch.zeros(3, 2)), "a sample of `my:data` is a tuple, not a dict of tensors"),
        ([{"x": 1}], "`x` in a sample of `my:data` must be a tensor, but is a int"),
        ([], "the first sample of `my:data` failed: IndexError"),
        (Fails(), "the first sample of `my:data` failed: OSError: the disk is gone"),
    ],
)
def test_what_is_no_dataset_is_an_error_of_the_plan(dataset: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        assert wrap_dataset(dataset, NOTHING, "my:data").info
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].path) == ("data-factory", ("data", "factory"))


def test_samples_per_epoch_is_the_length_and_a_pin_is_kept() -> None:
    dataset = wrap_dataset(Ours(), NOTHING, "my:Ours")
    assert count_samples_per_epoch(dataset, DataConfig()) == 4
    assert count_samples_per_epoch(dataset, DataConfig(samples_per_epoch=4)) == 4
    stream = wrap_dataset(OurStream(), NOTHING, "my:OurStream")
    for pinned, reason in (
        (dataset, "has 4 samples per epoch, but the plan expects 5"),
        (stream, "a stream has no fixed number"),
    ):
        with pytest.raises(PlanError, match=f"data-changed.*{reason}"):
            count_samples_per_epoch(pinned, DataConfig(samples_per_epoch=5))


@pytest.mark.parametrize(
    ("field", "message"), [({"batch_dim": 1, "sequence_dim": 1}, "are both 1"), ({"dtype": "int65"}, "int64")]
)
def test_fields_that_mean_nothing_are_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FactoryDataConfig.model_validate({"fields": {"x": {"dtype": "int64", **field}}})


REST = tomli_w.dumps({"plan": 1, **small_plan(data=None)}) + "\n"

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
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_numbers.py").write_text(MODULE)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_bytes(bytes(range(20)))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_numbers", raising=False)
    return tmp_path


def a_plan(folder: Path, data: str) -> Plan:
    return plan_from_text(REST + data, folder=folder)


def test_what_is_wrong_with_the_data_has_its_place(folder: Path) -> None:
    data = '[data]\nuse = "data.text"\nfiles = [\n  "corpus/*.txt",\n  "corpus/none.txt",\n]\nsequence = 4\n'
    problems = check_plan(a_plan(folder, data), 1)
    assert [problem.code for problem in problems] == ["data-missing"]
    assert problems[0].place is not None
    assert problems[0].place.line == len(REST.splitlines()) + 5


def test_a_plan_is_pinned_to_its_number_of_samples(folder: Path) -> None:
    plan = a_plan(folder, '[data]\nuse = "data.text"\nfiles = ["corpus/*.txt"]\nsequence = 4\nheld_out = 0.0\n')
    count = count_samples_per_epoch(open_dataset(plan.data, DataContext()), plan.data.config)
    pinned = plan_from_text(replace_values(plan, {("data", "samples_per_epoch"): count}).to_toml(), folder=folder)
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
    held_out = open_dataset(plan.data, DataContext(split="held_out"))  # which `context` tells it
    with Feed(held_out, seed=0, batch_size=1, rows=range(1), shuffle=False) as feed:
        assert feed.next()["tokens"].item() == 107


def test_a_factory_that_does_not_has_nothing_held_out(folder: Path) -> None:
    plan = a_plan(folder, '[data]\nfactory = "my_numbers:without_context"\noptions = { start = 7 }\n')
    assert len(open_dataset(plan.data, DataContext())) == 3
    with pytest.raises(PlanError, match="has no parameter `context`") as caught:
        open_dataset(plan.data, DataContext(split="held_out"))
    assert caught.value.diagnostics[0].code == "held-out"
