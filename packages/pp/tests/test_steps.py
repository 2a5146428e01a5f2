"""Tests the copies, messages, waits and collectives of a step."""

import contextlib
import time

import pytest
import torch

from sley_core.comm.transport import Work
from sley_core.comm.world import Group
from sley_core.errors import RunError
from sley_testing.collectives import collectives
from sley_testing.runs import running

# -- reductions and sends ----------------------------------------------------------------------------------------------


class RecordedReduction:
    """A reduction that records its waits."""

    def __init__(self, pending: Work, events: list[str]) -> None:
        self.pending = pending
        self.events = events

    def wait(self) -> None:
        self.events.append("wait")
        self.pending.wait()


def refuse_synchronisation(*arguments):
    raise AssertionError("a device is synchronised")


def sends_and_waits(tables, folder):
    """Returns the sent gradients and awaited reductions of the second step on this rank, in order."""
    torch.cuda.synchronize = torch.accelerator.synchronize = torch.cpu.synchronize = refuse_synchronisation
    events: list[str] = []
    with running(tables, folder) as run:
        names = {param.name for param in run.registry}
        all_reduce, link = Group.all_reduce, run.stepper.executor.boundaries.link
        send = link.send

        def sent(transfer, *arguments):
            if transfer.flow == "backward":
                events.append(f"send {transfer.micro}")
            send(transfer, *arguments)

        link.send = sent

        def reduce(*args, label):
            pending = all_reduce(*args, label=label)
            return RecordedReduction(pending, events) if label in names else pending

        Group.all_reduce = reduce
        run.step()
        events.clear()
        run.step()
        return events


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["pp.zero_bubble_h1", "pp.one_f_one_b", "pp.gpipe"])
def test_the_last_gradient_is_sent_before_any_reduction_is_awaited(ranks, small, own, schedule):
    """A slow reduction delays no other stage, and no device is synchronised."""
    tables = small(schedule, 2, 2, batch={"global_size": 8, "micro_size": 1})
    *first, one, other = ranks(4)(sends_and_waits, tables, own)
    assert all(set(events) == {"wait"} for events in first)
    for events in (one, other):
        assert events[:4] == [f"send {micro}" for micro in range(4)]
        assert set(events[4:]) == {"wait"}


# -- groups, buffers, limits -------------------------------------------------------------------------------------------


def record_collectives(tables, folder):
    """Returns every collective of two steps and an evaluation, and the number of the link's buffers after each step."""
    with running(tables, folder) as run:
        link = run.stepper.executor.boundaries.link
        allocated = []
        with collectives() as calls:
            for _ in range(2):
                run.step()
                allocated.append(link._pool.num_allocations)
            run.evaluate()
            run.step()
            allocated.append(link._pool.num_allocations)
        return [(call.op, call.group, call.ranks) for call in calls], allocated


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["pp.interleaved", "pp.zero_bubble_h1"])
def test_collectives_and_messages_use_separate_groups(ranks, small, own, schedule):
    """The default group has no collective, and `pp` only messages. Steps reuse buffers."""
    model = {"factory": "pp_parts:tied", "options": {"ends": True}}
    tables = small(schedule, 2, 2, model=model, evaluation={"every": 9, "steps": 1})
    for rank, (calls, allocated) in enumerate(ranks(4)(record_collectives, tables, own)):
        assert len(calls) > 40
        for op, group, members in calls:
            axis = group.partition("[")[0].partition(".")[0]
            assert axis in {"pp", "stage", "tie", "all", "control"}, group
            assert (op in {"send", "recv"}) == (axis == "pp"), (op, group)
            assert rank in members
        assert allocated[1:] == allocated[:1] * 2, "the first step makes what all steps need"


def run_with_hanging_stage(tables, folder, ended):
    """Returns the first stage's error while the last stage's first layer hangs: until that error, or 30 s."""

    def hang(*_):
        limit_s = time.monotonic() + 30
        while not ended.exists() and time.monotonic() < limit_s:
            time.sleep(0.05)
        return ended.exists()

    with running(tables, folder) as run:
        if run.groups["pp"].coord == 1:
            in_time = []
            run.layers[0].module.register_forward_pre_hook(lambda *_: in_time.append(hang()))
            with contextlib.suppress(RunError):
                run.step()
            return in_time[0]
        with pytest.raises(RunError) as raised:
            run.step()
        ended.touch()
        return str(raised.value)


def test_a_timeout_names_its_message(ranks, small, own, tmp_path):
    """The error has operation, stages, direction and microbatch, and comes within the plan's time limit."""
    tables = small("pp.one_f_one_b", 2, limits={"collective_timeout_s": 1.0})
    told, in_time = ranks(2)(run_with_hanging_stage, tables, own, tmp_path / "ended")
    assert "receive of what stage 0 receives from stage 1, the gradient for microbatch 0 (backward" in told.replace("\n", " ")
    assert "pp[0, 1]" in told
    assert in_time
