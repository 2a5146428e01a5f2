"""A distribution of somebody else's, `sley-wave`, as pip leaves it: beside core, and no other package of ours is used."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN = Path(__file__).parent / "own"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "sley_wave-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sley-wave\nVersion: 1.0\nRequires-Dist: sley-core\n")
    (info / "entry_points.txt").write_text("[sley.plugins]\nwave = sley_wave.plugin\nbroken = broken_links\n")
    monkeypatch.syspath_prepend(OWN)
    monkeypatch.syspath_prepend(tmp_path)
