from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from sley_core.data.dataset import TOKEN_FIELDS, DataConfig, DataInfo, FactoryDataConfig, Field, FieldConfig
from sley_core.data.factory import declared, samples_per_epoch
from sley_core.data.feed import Feed
from sley_core.errors import PlanError

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
    assert declared(Ours(), NOTHING, "my:Ours").info == DataInfo(INFERRED)
    assert declared(OurStream(), NOTHING, "my:OurStream").info == DataInfo({"x": Field("int64")})


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
    fields = declared(Chats([sample]), NOTHING, "my:Chats").info.fields
    assert (fields == TOKEN_FIELDS) == are_ids
    assert are_ids or all(field.sequence_dim is None and field.ids is None for field in fields.values())


def test_the_datasets_own_info_comes_before_its_samples() -> None:
    class Declares(Ours):
        info = DataInfo({"image": Field("float32", 0, 2), "label": Field("int64", ids="label")}, vocab_size=10)

    assert declared(Declares(), NOTHING, "my:Declares").info == Declares.info


def test_the_plan_comes_before_the_datasets_own_info() -> None:
    class Declares(Ours):
        info = DataInfo(INFERRED, vocab_size=10, sequence=7)

    fields = {"image": FieldConfig(dtype="float32", sequence_dim=1), "label": FieldConfig(dtype="int64", ids="label")}
    config = FactoryDataConfig(fields=fields, vocab_size=20)
    info = declared(Declares(), config, "my:Declares").info
    assert info.fields == {"image": Field("float32", 0, 1), "label": Field("int64", ids="label")}
    assert (info.vocab_size, info.sequence) == (20, 7)


def test_a_plan_may_add_a_vocabulary_to_inferred_fields() -> None:
    info = declared(Ours(), FactoryDataConfig(vocab_size=5, sequence=3), "my:Ours").info
    assert info == DataInfo(INFERRED, vocab_size=5, sequence=3)


def test_torchs_datasets_and_streams_are_fed() -> None:
    with Feed(declared(Ours(), NOTHING, "my:Ours"), seed=0, batch_size=4, rows=range(4)) as feed:
        batch = feed.next()
    assert batch["image"].shape == (4, 2, 3)
    assert sorted(batch["label"].tolist()) == [0, 1, 2, 3]
    with Feed(declared(OurStream(), NOTHING, "my:OurStream"), seed=0, batch_size=4, rows=range(2, 4)) as feed:
        assert feed.next()["x"].tolist() == [[2, 2], [0, 0]]
        assert feed.next()["x"].tolist() == [[0, 0], [1, 1]]


def test_a_datasets_collate_is_used_and_its_batch_is_what_is_inferred() -> None:
    class Ragged(Ours):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": torch.full((index + 1,), index)}

        def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            joined = torch.nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
            return {"x": joined, "mask": joined > 0}

    dataset = declared(Ragged(), NOTHING, "my:Ragged")
    assert dataset.info.fields == {"x": Field("int64"), "mask": Field("bool")}
    with Feed(dataset, seed=0, batch_size=2, rows=range(2), shuffle=False) as feed:
        assert feed.next()["x"].tolist() == [[0, 0], [1, 1]]


def test_a_streams_state_is_reached_through_its_declaration() -> None:
    class Stateful:
        place = 0

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            while True:
                self.place += 1
                yield {"x": torch.tensor(self.place)}

        def state(self) -> int:
            return self.place

        def restore(self, state: int) -> None:
            self.place = state

    config = FactoryDataConfig(fields={"x": FieldConfig(dtype="int64")})
    with Feed(declared(Stateful(), config, "my:Stateful"), seed=0, batch_size=2, rows=range(2)) as feed:
        feed.next()
        feed.next()
        assert feed.state()["replay"]["place"] == {"epoch": 0, "stream": 2}
        feed.restore({"samples": 0})
        assert feed.next()["x"].tolist() == [1, 2]


class Fails(Ours):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (7, "gave a int, which is no data set"),
        (None, "gave a NoneType, which is no data set"),
        (({"x": torch.zeros(1)} for _ in range(3)), "gave a generator, which can be walked only once"),
        (TensorDataset(torch.zeros(3, 2)), "a sample of `my:data` is a tuple, not a dict of tensors"),
        ([{"x": 1}], "`x` in a sample of `my:data` is a int, not a tensor"),
        ([], "the first sample of `my:data` failed: IndexError"),
        (Fails(), "the first sample of `my:data` failed: OSError: the disk is gone"),
    ],
)
def test_what_is_no_dataset_is_an_error_of_the_plan(dataset: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        assert declared(dataset, NOTHING, "my:data").info
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].path) == ("data-factory", ("data", "factory"))


def test_a_list_of_samples_is_a_dataset() -> None:
    dataset = declared([{"x": torch.tensor(number)} for number in range(3)], NOTHING, "my:data")
    with Feed(dataset, seed=0, batch_size=3, rows=range(3), shuffle=False) as feed:
        assert feed.next()["x"].tolist() == [0, 1, 2]


def test_samples_per_epoch_is_the_length_and_a_pin_is_kept() -> None:
    dataset = declared(Ours(), NOTHING, "my:Ours")
    assert samples_per_epoch(dataset, DataConfig()) == 4
    assert samples_per_epoch(dataset, DataConfig(samples_per_epoch=4)) == 4
    with pytest.raises(PlanError, match="has 4 samples per epoch, and this plan was made for 5") as caught:
        samples_per_epoch(dataset, DataConfig(samples_per_epoch=5))
    assert caught.value.diagnostics[0].code == "data-changed"


def test_a_stream_has_no_samples_per_epoch() -> None:
    stream = declared(OurStream(), NOTHING, "my:OurStream")
    assert samples_per_epoch(stream, DataConfig()) is None
    with pytest.raises(PlanError, match="a stream has no number"):
        samples_per_epoch(stream, DataConfig(samples_per_epoch=3))


@pytest.mark.parametrize(
    ("field", "message"), [({"batch_dim": 1, "sequence_dim": 1}, "are both 1"), ({"dtype": "int65"}, "int64")]
)
def test_fields_that_mean_nothing_are_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FactoryDataConfig.model_validate({"fields": {"x": {"dtype": "int64", **field}}})
