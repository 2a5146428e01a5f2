"""What the tests of estimates share: the folder of their own layers, with texts in it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_layers(texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the texts; plans may name modules of the folder `own` beside this file."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "own")
    return texts
