"""Tables, schedules and writers are there before torch is, so that checks answer at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ["config", "optim.config", "optim.learning_rate", "json_text", "metrics.jsonl"]


@pytest.mark.parametrize("piece", ["config", "optim", "metrics"])
def test_modules_that_import_no_torch(piece: str) -> None:
    names = [f"sley_core.{module}" for module in MODULES if module.startswith(piece)]
    code = f"import {', '.join(names)}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
