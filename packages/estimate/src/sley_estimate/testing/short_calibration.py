"""Lets calibration measure small tensors a few times, for tests of what it does with its figures.

    with shortly():
        machine = measure(world, plan, timeout_s=30)

Since core 0.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from sley_estimate.bench import lead
from sley_estimate.calibrate import device, host, layers, links


@contextmanager
def shortly() -> Iterator[None]:
    """Returns a context manager within which what is measured is small, and measured a few times: its figures are right in kind
    and worth little.
    """
    with ExitStack() as patches:
        for module, name, value in (
            (device, "SIZES", {"cpu": (32, 64)}),
            (device, "MOVED_BYTES", {"cpu": 1 << 20}),
            (device, "REPETITIONS", 3),
            (links, "MANY", 1 << 18),
            (links, "EDGE", 64),
            (links, "REPETITIONS", 3),
            (layers, "REPETITIONS", 3),
            (layers, "REPETITIONS_OF_OTHERS", 1),
            (host, "BUCKET", 1 << 14),
            (lead, "WRITTEN_BYTES", {"cpu": 1 << 16}),
        ):
            patches.enter_context(patch.object(module, name, value))
        yield
