"""A gradient that is no number on one stage is a step that no stage takes, and all stages say where it began."""

from __future__ import annotations

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.runs import weights

NAME = "blocks.0.inner.weight"


def go_on(tables, folder):
    """The second of three steps is spoilt on the stage that holds `NAME`."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        if NAME in run.registry.names:
            param = run.registry[NAME]
            param.parameter.register_hook(
                lambda gradient: gradient * float("nan") if run.store.state.step == 1 and spoilt else gradient
            )
        spoilt = True
        run.step()
        before = weights(run)
        try:
            run.step()
        except RunError as error:
            told = str(error.diagnostics[0])
        assert_same_bits(before, weights(run))
        spoilt = False
        return told, run.step()


def test_a_stage_whose_gradient_is_no_number_is_named_by_all(ranks, own, small):
    found = ranks(2)(go_on, small("pp.one_f_one_b", 2), own)
    told, row = found[0]
    assert told == found[1][0]
    assert "error[not-finite]: step 2: loss " in told
    assert f"; first in the gradient of '{NAME}' (stage 0); samples " in told
    assert row["step"] == found[1][1]["step"] == 3
