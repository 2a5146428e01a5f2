"""A folder of safetensors files has exactly the tensors of its index, or says what is wrong; few bytes are used beside them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sley_core.errors import RunError
from sley_core.weight_files.read import INDEX_FILE, SINGLE_FILE, TensorInfo, WeightFiles
from sley_core.weight_files.write import Spec, scratch_folder, write_tensors

A, B = torch.arange(12.0).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16)
INDEX = {"a": "one.safetensors", "b": "two.safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files with a tensor each, and their index."""
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    write_index(tmp_path, INDEX)
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def test_a_tensor_does_not_follow_its_file(folder: Path) -> None:
    value = WeightFiles(folder).tensor("a")
    save_file({"a": torch.zeros(3, 4)}, folder / "one.safetensors")
    assert torch.equal(value, A)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "more in index": (lambda folder: write_index(folder, {**INDEX, "c": "one.safetensors"}), "tensors in the files: 'c'"),
    "less in index": (lambda folder: save_file({"b": B, "x": A}, folder / "two.safetensors"), "files: 'x'"),
    "other file": (lambda folder: write_index(folder, {"a": "two.safetensors", "b": "one.safetensors"}), "files: 'a', 'b'"),
    "twice": (lambda folder: save_file({"b": B, "a": A}, folder / "two.safetensors"), "files: 'a'"),
    "no file": (lambda folder: (folder / "two.safetensors").unlink(), "two.safetensors`: the file does not exist"),
    "cut": (lambda folder: cut(folder / "one.safetensors", -3), "one.safetensors`: it is damaged"),
    "cut head": (lambda folder: cut(folder / "one.safetensors", 4), "one.safetensors`: it is damaged"),
    "empty": (lambda folder: cut(folder / "one.safetensors", 0), "one.safetensors`: it is damaged"),
    "outside": (lambda folder: write_index(folder, {**INDEX, "a": "../one.safetensors"}), "which is not in its folder"),
    "no map": (lambda folder: (folder / INDEX_FILE).write_text("{}"), "it has no `weight_map`"),
    "no JSON": (lambda folder: (folder / INDEX_FILE).write_text("{"), "cannot read .*index.json"),
    "no names": (lambda folder: write_index(folder, {}), "its `weight_map` names no files"),
    "huge": (lambda folder: os.truncate(folder / INDEX_FILE, 1 << 40), "cannot read .*: it is larger than"),
    "list": (lambda folder: write_index(folder, ["a"]), "cannot read .*index.json"),
    "nothing": (lambda folder: (folder / INDEX_FILE).unlink(), f"has neither `{SINGLE_FILE}` nor `{INDEX_FILE}`"),
    "pickles": (lambda folder: (folder / INDEX_FILE).rename(folder / "pytorch_model.bin"), "can run code when it is read"),
    "folder": (lambda folder: ((folder / "one.safetensors").unlink(), (folder / "one.safetensors").mkdir()), "one.safe"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_does_not_hold_what_it_says_is_refused(folder: Path, fault: str) -> None:
    break_it, says = FAULTS[fault]
    break_it(folder)
    with pytest.raises(RunError, match=says) as raised:
        WeightFiles(folder)
    assert raised.value.diagnostics[0].code == "weight-files"


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

    def info(self, name: str) -> TensorInfo:
        spec = Spec.from_dtype(name, self.values[name].dtype, self.values[name].shape)
        return TensorInfo(spec.dtype, spec.shape)

    def tensor(self, name: str) -> Tensor:
        if self.broken is not None and self.broken[0] == name:
            raise self.broken[1]
        return self.values[name]


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and (
        one.contiguous().view(-1).view(torch.uint8).tolist() == other.contiguous().view(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize("max_bytes", [1, 20, 10**6])
def test_what_is_written_is_what_the_library_reads(tmp_path: Path, max_bytes: int) -> None:
    names = [(name, f"m.{name}") for name in VALUES]
    files = write_tensors(tmp_path / "out", Given(VALUES), names, max_bytes)
    found = {name: value for file in files for name, value in load_file(tmp_path / "out" / file).items()}
    assert found.keys() == {f"m.{name}" for name in VALUES}
    assert all(have_same_bits(found[f"m.{name}"], value) for name, value in VALUES.items())
    assert WeightFiles(tmp_path / "out").names, "the index names exactly these"
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in VALUES.values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(28, "No space left on device"), RunError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_what_is_not_written_in_full_leaves_nothing(tmp_path: Path, error: BaseException, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        write_tensors(tmp_path / "out", Given(VALUES, ("double", error)), zip(VALUES, VALUES, strict=True), 10)
    assert list(tmp_path.iterdir()) == []


def test_a_type_without_a_name_is_refused_by_the_tensors_name() -> None:
    with pytest.raises(RunError, match=r"'phase' is torch.complex64"):
        Spec.from_dtype("phase", torch.complex64, (1,))


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    scratch = scratch_folder(tmp_path / "out")
    scratch.mkdir()
    (scratch / "model.safetensors").write_text("half")
    write_tensors(tmp_path / "out", Given(VALUES), [("half", "half")], 10**6)
    assert have_same_bits(load_file(tmp_path / "out" / "model.safetensors")["half"], VALUES["half"])
