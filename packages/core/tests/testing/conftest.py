"""What the tests of the test kit share."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN = Path(__file__).parent / "own"


@pytest.fixture
def naive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin `naive`, as pip leaves a distribution."""
    info = tmp_path / "naive-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: naive\nVersion: 1.0\nRequires-Dist: sley-core\n")
    (info / "entry_points.txt").write_text("[sley.plugins]\nnaive = naive_plugin\n")
    monkeypatch.syspath_prepend(OWN)
    monkeypatch.syspath_prepend(tmp_path)
