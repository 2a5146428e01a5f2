"""What is installed is read once as long as its folder stays as it is, and again when it does not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sley_core import discovery
from sley_core.discovery import installed

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


def test_a_folder_that_stays_as_it_is_is_read_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_time(site, LONG_AGO)
    first = installed()
    read: list[list[str]] = []

    def reading(*, path: list[str]) -> list[object]:
        read.append(path)
        return []

    monkeypatch.setattr(discovery, "distributions", reading)
    assert installed()["odd"] == first["odd"]
    assert [str(site)] not in read


def test_what_is_added_is_found(site: Path) -> None:
    set_time(site, LONG_AGO)
    assert "even" not in installed()
    add(site, "even")
    assert {"odd", "even"} <= installed().keys()


def test_the_current_folder_is_the_one_of_now(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    add(other, "even")
    for folder in (site, other):
        set_time(folder, LONG_AGO)
    monkeypatch.setattr("sys.path", [""])
    monkeypatch.chdir(site)
    assert installed().keys() == {"odd"}
    monkeypatch.chdir(other)
    assert installed().keys() == {"even"}


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
        assert sorted(one.dist for one in installed()["odd"]) == ["other", "sley-odd"]
