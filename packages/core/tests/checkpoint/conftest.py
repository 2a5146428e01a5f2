"""What the tests of checkpoints share: a small plan over a model of their own, which takes more steps than others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sley_core.testing.plans import changed, small_plan

OWN = Path(__file__).parent / "own"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the plans' own modules; it is on the path, in ranks too."""
    monkeypatch.syspath_prepend(OWN)
    return OWN


def longer(**changes: Any) -> dict[str, Any]:
    """The small plan with six steps, and a rate that falls."""
    return changed(small_plan(run__steps=6, learning_rate={"use": "core.cosine"}), **changes)
