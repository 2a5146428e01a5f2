"""A loss of one's own is a sum and a count; one that is no such thing is refused, with the way to write it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sley_core.errors import PlanError, RunError
from sley_testing.runs import assert_by_hand, record


def by_factory(small, name, **changes):
    return small(loss={"factory": f"own_losses:{name}", **changes.pop("options", {})}, **changes)


@pytest.mark.parametrize("micro_size", [1, 2])
def test_a_mean_is_refused_at_the_first_batch_with_the_way_to_write_a_sum(alone, small, micro_size):
    with alone(by_factory(small, "Mean", batch__micro_size=micro_size, evaluation={"every": 9, "steps": 1})) as run:
        before = {param.name: param.parameter.detach().clone() for param in run.registry}
        for ask in (run.step, run.evaluate, run.train):
            with pytest.raises(RunError, match=r'batch is 1, but its \d micro-batches.*\n.*reduction="sum"') as caught:
                ask()
            assert caught.value.diagnostics[0].code == "loss-not-additive"
        assert all(torch.equal(param.parameter, before[param.name]) for param in run.registry)
        assert run.num_steps_done == 0


def test_what_the_hint_says_is_the_loop_by_hand_with_labels_ignored_unevenly(own, small):
    import own_data
    import own_models

    batches = [own_data.batch(5 * step, 4) for step in range(3)]
    batches[1]["labels"][2] = -100  # a micro-batch of which nothing counts
    found = record(by_factory(small, "Sum"), 3, folder=own, batches=batches)
    by_hand = partial(torch.optim.SGD, lr=0.1)
    assert_by_hand(found, own_models.plain(own_data.Rows.info), batches, by_hand, micro_size=1)


@pytest.mark.parametrize(
    ("name", "parameter"), [("Tempered", "temperature"), ("Centres", "parts.all.0.bias"), ("Closed", "loss.func.scale")]
)
def test_parameters_of_a_loss_are_refused_by_name(alone, small, name, parameter):
    with pytest.raises(PlanError, match=rf"loss-parameters.*`{parameter}`.*\n.*last layer"), alone(by_factory(small, name)):
        pass
