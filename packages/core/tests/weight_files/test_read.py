"""A folder of safetensors files has exactly the tensors of its index, or says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sley_core.errors import RunError
from sley_core.weight_files.read import INDEX, SINGLE, WeightFiles

A, B = torch.arange(12.0).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files with a tensor each, and their index."""
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def test_names_types_and_values_are_those_of_the_files(folder: Path) -> None:
    files = WeightFiles(folder)
    assert files.names == ["a", "b"]
    assert files.stored["a"] == (folder / "one.safetensors", "F32", (3, 4))
    assert files.stored["b"].dtype == "BF16"
    assert torch.equal(files.tensor("a"), A)
    assert torch.equal(files.tensor("b"), B)


def test_a_tensor_does_not_follow_its_file(folder: Path) -> None:
    value = WeightFiles(folder).tensor("a")
    save_file({"a": torch.zeros(3, 4)}, folder / "one.safetensors")
    assert torch.equal(value, A)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "more in index": (
        lambda folder: write_index(folder, dict.fromkeys("ac", "one.safetensors") | {"b": "two.safetensors"}),
        "names tensors that no file has: 'c'",
    ),
    "less in index": (
        lambda folder: save_file({"b": B, "x": A}, folder / "two.safetensors"),
        "does not name tensors of its files: 'x'",
    ),
    "other file": (
        lambda folder: write_index(folder, {"a": "two.safetensors", "b": "one.safetensors"}),
        "names another file for: 'b', 'a'",
    ),
    "twice": (lambda folder: save_file({"b": B, "a": A}, folder / "two.safetensors"), "'a' in .*two.* and in another file"),
    "no file": (lambda folder: (folder / "two.safetensors").unlink(), "two.safetensors`: there is no such file"),
    "cut": (lambda folder: cut(folder / "one.safetensors", -3), "one.safetensors`: it is damaged"),
    "cut head": (lambda folder: cut(folder / "one.safetensors", 4), "one.safetensors`: it is damaged"),
    "empty": (lambda folder: cut(folder / "one.safetensors", 0), "one.safetensors`: it is damaged"),
    "outside": (
        lambda folder: write_index(folder, {"a": "../one.safetensors", "b": "two.safetensors"}),
        "which is not in its folder",
    ),
    "no map": (lambda folder: (folder / INDEX).write_text("{}"), "it has no `weight_map`"),
    "no JSON": (lambda folder: (folder / INDEX).write_text("{"), "cannot read .*index.json"),
    "list": (lambda folder: write_index(folder, ["a"]), "cannot read .*index.json"),
    "nothing": (lambda folder: (folder / INDEX).unlink(), f"has neither `{SINGLE}` nor `{INDEX}`"),
    "folder": (lambda folder: ((folder / "one.safetensors").unlink(), (folder / "one.safetensors").mkdir()), "one.safe"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_does_not_hold_what_it_says_is_refused(folder: Path, fault: str) -> None:
    break_it, says = FAULTS[fault]
    break_it(folder)
    with pytest.raises(RunError, match=says) as raised:
        WeightFiles(folder)
    assert raised.value.diagnostics[0].code == "weight-files"


def test_pickled_weights_are_not_read_and_the_hint_says_why(folder: Path) -> None:
    (folder / INDEX).unlink()
    torch.save({"a": A}, folder / "pytorch_model.bin")
    with pytest.raises(RunError, match="may run code when it is read"):
        WeightFiles(folder)
