"""The folder of the tests' own modules is on the path, in ranks too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "own"))
