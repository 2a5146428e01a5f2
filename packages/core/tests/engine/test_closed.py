"""A run that is closed says so, whatever is asked of it; closing it again is nothing."""

from __future__ import annotations

import pytest

from sley_core.engine.step_batch import StepBatch
from sley_core.errors import RunError


def test_a_closed_run_does_nothing_and_says_so(alone, small):
    with alone(small(evaluation={"every": 9, "steps": 1})) as run:
        run.step()
    weights = [param.parameter.detach().clone() for param in run.registry]
    calls = (
        run.step,
        run.train,
        run.evaluate,
        lambda: run.before_layer("head", lambda: None),
        lambda: run.stepper.step(1, StepBatch([{}], [{}])),
        run.store.begin_step,
    )
    for call in calls:
        with pytest.raises(RunError, match=r"error\[run-closed\]: the (run|stepper|gradient store) is used after") as caught:
            call()
        assert caught.value.diagnostics[0].hint
    run.stop()
    for close in (run.close, run.stepper.close, run.store.close):
        close()
    assert all(param.parameter.equal(was) for param, was in zip(run.registry, weights, strict=True))
    assert run.num_steps_done == 1
    assert run.counts == {"core.each": {"sent_bytes_per_step": 0}}
