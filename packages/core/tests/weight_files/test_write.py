"""Files are written tensor by tensor as the library would write them; a folder of them is there as a whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sley_core.errors import RunError
from sley_core.sizes import split_by_size
from sley_core.weight_files.read import INDEX, TensorKind, WeightFiles
from sley_core.weight_files.write import Spec, TensorFile, unfinished, write_tensors

VALUES: dict[str, Tensor] = {
    "odd": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.tensor([[1.5, -0.0, float("inf")]], dtype=torch.bfloat16),
    "steps": torch.tensor(2**40),
    "view": torch.arange(12.0).reshape(3, 4).t(),
    "double": torch.tensor([1e-300, -1e300], dtype=torch.float64),
    "none": torch.zeros(0, 4),
}


class Given:
    """Tensors in memory; `broken` raises instead of one of them."""

    def __init__(self, values: dict[str, Tensor], broken: tuple[str, BaseException] | None = None) -> None:
        self.values = values
        self.broken = broken

    @property
    def names(self) -> list[str]:
        return list(self.values)

    def kind(self, name: str) -> TensorKind:
        spec = Spec.of(name, self.values[name].dtype, self.values[name].shape)
        return TensorKind(spec.dtype, spec.shape)

    def tensor(self, name: str) -> Tensor:
        if self.broken is not None and self.broken[0] == name:
            raise self.broken[1]
        return self.values[name]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and (
        one.contiguous().view(-1).view(torch.uint8).tolist() == other.contiguous().view(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize("max_bytes", [1, 20, 10**6])
def test_what_is_written_is_what_the_library_reads(tmp_path: Path, max_bytes: int) -> None:
    names = [(name, f"m.{name}") for name in VALUES]
    files = write_tensors(tmp_path / "out", Given(VALUES), names, max_bytes)
    found = {name: value for file in files for name, value in load_file(tmp_path / "out" / file).items()}
    assert found.keys() == {f"m.{name}" for name in VALUES}
    assert all(same_bits(found[f"m.{name}"], value) for name, value in VALUES.items())
    assert WeightFiles(tmp_path / "out").names, "the index names exactly these"
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in VALUES.values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_is_full_before_the_next_begins() -> None:
    specs = [Spec(name, "F32", (size,)) for name, size in zip("abcde", (2, 2, 5, 1, 1), strict=True)]
    files = split_by_size(specs, lambda spec: spec.num_bytes, 16)
    assert [[spec.name for spec in file] for file in files] == [["a", "b"], ["c"], ["d", "e"]]
    assert split_by_size([], len, 16) == []


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(28, "No space left on device"), RunError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_what_is_not_written_in_full_leaves_nothing(tmp_path: Path, error: BaseException, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        write_tensors(tmp_path / "out", Given(VALUES, ("double", error)), zip(VALUES, VALUES, strict=True), 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda file: file.add("a", torch.zeros(2, 2)),
        lambda file: file.add("a", torch.zeros(4, dtype=torch.float64)),
        lambda file: (file.add("a", torch.zeros(4)), file.add("a", torch.zeros(4))),
        lambda file: file.close(),
    ],
    ids=["shape", "type", "twice", "missing"],
)
def test_a_tensor_other_than_the_header_says_is_our_fault(tmp_path: Path, wrong: Callable[[TensorFile], object]) -> None:
    file = TensorFile(tmp_path / "f", [Spec("a", "F32", (4,))])
    with pytest.raises(AssertionError):
        wrong(file)
    file.drop()


def test_a_type_without_a_name_is_refused_by_the_tensors_name() -> None:
    with pytest.raises(RunError, match=r"'phase' is torch.complex64"):
        Spec.of("phase", torch.complex64, (1,))


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    scratch = unfinished(tmp_path / "out")
    scratch.mkdir()
    (scratch / "model.safetensors").write_text("half")
    write_tensors(tmp_path / "out", Given(VALUES), [("half", "half")], 10**6)
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors")["half"], VALUES["half"])
