from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.append(str(Path(__file__).parent / "own"))  # modules of tests import from there while they are collected

# A loaded machine is slow, not wrong.
settings.register_profile("sley", deadline=None)
settings.load_profile("sley")
