"""Lets one step of a run fail in a backward, as contracts do that look at what it leaves.

Since core 0.1.
"""

from __future__ import annotations

from itertools import count

import pytest
from torch import Tensor

from sley_core.run import Run


def fail_once(run: Run, backward: int = 0) -> None:
    """Takes a step that raises at the first layer, in this rank's `backward`-th one (0 is the first); then moves the data back.

    All ranks call it. Of a layer that comes last in a backward handlers hear last: they know of the others' gradients already.
    """
    calls = count()

    def fail(_: Tensor) -> None:
        if next(calls) == backward:
            raise ValueError("the contract's failing backward")

    assert run.feed is not None
    before = run.feed.state()
    hook = run.registry.trainable[0].parameter.register_hook(fail)  # type: ignore[no-untyped-call]  # torch's
    with pytest.raises(ValueError, match="the contract's failing backward"):
        run.step()
    hook.remove()
    run.feed.restore(before)
