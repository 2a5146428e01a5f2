"""Types and values are said in words that a person would use."""

from __future__ import annotations

import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, PositiveInt

from sley_core.discovery import find_plugins
from sley_core.errors import is_installed
from sley_core.table import Array, Table
from sley_core.words import describe_type, find_field, suggestion


class Inner(Table):
    size: PositiveInt


class Outer(Table):
    one: Inner | None = None
    many: Array[Inner] = ()
    named: dict[str, Inner] = Field(default_factory=dict)
    pair: tuple[int, str] = (1, "")
    free: dict[str, Any] = Field(default_factory=dict)


def test_fields_are_found_inside_tables_arrays_and_unions() -> None:
    for path in (("one", "size"), ("many", 3, "size"), ("named", "x", "size")):
        found = find_field(Outer, path)
        assert found
        assert describe_type(*found) == "an integer of at least 1"
    assert find_field(Outer, ("pair", 1)) == (str, ())
    assert find_field(Outer, ("pair", 7)) == (str, ())
    assert find_field(Outer, ("free", "x")) == (Any, ())
    for nowhere in (("none",), ("one", "x"), ("many", "x"), ("one", 1)):
        assert find_field(Outer, nowhere) is None


def test_suggestions() -> None:
    assert suggestion("stesp", ["steps", "seed"]) == "did you mean `steps`?"
    assert suggestion("x", ["steps"], "its keys are `steps`") == "its keys are `steps`"
    assert suggestion("x", []) is None


LONG_AGO = time.time() - 3600


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the front of `sys.path`, with the plugin `odd`."""
    monkeypatch.syspath_prepend(tmp_path)
    add(tmp_path, "odd")
    return tmp_path


def add(folder: Path, name: str, dist: str = "") -> None:
    info = folder / f"sley_{name}{dist}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist or f'sley-{name}'}\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[sley.plugins]\n{name} = module_of_{name}\n", "utf-8")


def set_time(folder: Path, at: float) -> None:
    os.utime(folder, (at, at))


def test_what_is_added_is_found(site: Path) -> None:
    set_time(site, LONG_AGO)
    assert "even" not in find_plugins()
    add(site, "even")
    assert {"odd", "even"} <= find_plugins().keys()


def test_two_distributions_of_one_plugin_are_both_found_and_one_that_is_met_twice_once(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path_factory.mktemp("again")
    add(again, "odd")
    add(again, "odd", dist="other")
    monkeypatch.syspath_prepend(again)
    for folder in (site, again):
        set_time(folder, LONG_AGO)
    for _ in range(2):
        assert sorted(one.dist for one in find_plugins()["odd"]) == ["other", "sley-odd"]


def test_a_project_in_or_beside_an_environment_is_no_library() -> None:
    environment = sysconfig.get_path("data")
    assert not is_installed(f"{environment}-project/model.py")
    assert not is_installed(str(Path(environment, "src", "model.py")))
