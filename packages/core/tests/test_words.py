"""Suggestions for misspelled names, discovery of plugins, and the origin of code."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from sley_core.errors import is_installed, suggestion
from sley_core.plan.loader import find_plugins


def test_suggestions() -> None:
    assert suggestion("stesp", ["steps", "seed"]) == "did you mean `steps`?"
    assert suggestion("x", ["steps"], "its keys are `steps`") == "its keys are `steps`"
    assert suggestion("x", []) is None


def add_plugin(folder: Path, dist: str) -> None:
    info = folder / f"{dist.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[sley.plugins]\nodd = module_of_odd\n", "utf-8")


def test_discovery_finds_each_distribution_of_a_plugin_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dists in (["sley-odd"], ["sley-odd", "other-odd"]):
        folder = tmp_path_factory.mktemp("site")
        for dist in dists:
            add_plugin(folder, dist)
        monkeypatch.syspath_prepend(folder)
    assert sorted(source.dist for source in find_plugins()["odd"]) == ["other-odd", "sley-odd"]


def test_a_project_in_or_beside_an_environment_is_not_installed() -> None:
    environment = sysconfig.get_path("data")
    assert not is_installed(f"{environment}-project/model.py")
    assert not is_installed(str(Path(environment, "src", "model.py")))
