"""What the plugin tells before a run, and that this costs no torch."""

from __future__ import annotations

import subprocess
import sys


def test_records_are_listed_without_torch() -> None:
    """Core and this package are enough: no sibling is imported."""
    code = (
        "import sys\n"
        "from sley_core.plan.loader import Loader\n"
        "found = Loader().load('memory').records\n"
        "print([*found['memory_pools']])\n"
        "siblings = ('torch', 'sley_isp', 'sley_pp', 'sley_dp')\n"
        "print([name for name in sys.modules if name.startswith(siblings)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["['size_classes']", "[]"]
