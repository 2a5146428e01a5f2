"""Provides the layers of the folder `own` to plans."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_layers(texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of the texts. Plans may name modules of the folder `own`."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "own")
    return texts
