"""Tests that the live objects of a rank are as many as the simulator predicts.

Weak references watch a run from outside, without keeping objects alive. Every tensor that a forward saves is wrapped, and
only the graph holds the wrapper. Only the queue holds the closures that an I defers to its W. A chunk's
pair with a microbatch counts as held while any of these is alive. Outputs must be freed as soon as they are sent.
"""

import weakref
from collections import defaultdict

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, simulate
from sley_core.engine.boundary import flatten
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import SchedulerHook
from sley_testing.plans import small_plan
from sley_testing.runs import running

MORE_MICROS = (1, 2, 3, 4, 5, 7, 8, 11, 16)
SCHEDULES = {
    "gpipe": {"use": "pp.gpipe"},
    "interleaved 3": {"use": "pp.interleaved", "chunks": 3},
    "one_f_one_b": {"use": "pp.one_f_one_b"},
    "interleaved 2": {"use": "pp.interleaved"},
    "zero_bubble_h1": {"use": "pp.zero_bubble_h1"},
    "zero_bubble_v": {"use": "pp.zero_bubble_v"},
}


class Saved:
    """Wraps a tensor that a graph holds."""

    def __init__(self, tensor):
        self.tensor = tensor


class Watch(SchedulerHook):
    """Counts live pairs and graphs. most: their peaks since the last call of `take`."""

    def __init__(self, run):
        self.saved = defaultdict(weakref.WeakSet)
        self.queued = defaultdict(weakref.WeakSet)
        self.outputs = defaultdict(weakref.WeakSet)
        self.most = (0, 0)
        self._hooks = None
        queue = run.stepper.executor.queue
        put = queue.put

        def watched_put(work, *of):
            self.queued[queue._open].add(work)
            put(work, *of)

        queue.put = watched_put
        run.stepper.executor.hooks.append(self)

    def before_forward(self, micro, inputs):
        self._look()
        self._enter(micro)

    def after_forward(self, micro, output):
        self._leave()
        self.outputs[micro.chunk, micro.micro].update(flatten(output)[0])

    def before_loss(self, micro, output):
        self.outputs.pop((micro.chunk, micro.micro))  # the loss may save it
        self._enter(micro)

    def after_loss(self, micro, loss):
        self._leave()

    def before_backward(self, micro, output_gradient):
        assert (micro.chunk, micro.micro) in self.pairs(), "the hook gets another action"
        self._look()

    def after_backward(self, micro, input_gradient):
        self._look()

    def take(self):
        """Returns the peaks since the last call. No counted object may be alive."""
        assert self.graphs() == set(), "graphs outlive the step"
        assert self.pairs() == set(), "what was put off outlives the step"
        most, self.most = self.most, (0, 0)
        return most

    def graphs(self):
        return {place for place, live in self.saved.items() if len(live)}

    def pairs(self):
        return self.graphs() | {place for place, live in self.queued.items() if len(live)}

    def _enter(self, micro):
        place = micro.chunk, micro.micro

        def pack(tensor):
            saved = Saved(tensor.detach())  # an output among them would hold its own graph
            self.saved[place].add(saved)
            return saved

        self._hooks = saved_tensors_hooks(pack, lambda saved: saved.tensor)
        self._hooks.__enter__()

    def _leave(self):
        self._hooks.__exit__()
        self._count()

    def _count(self):
        self.most = max(self.most[0], len(self.pairs())), max(self.most[1], len(self.graphs()))

    def _look(self):
        """Asserts that no output is held, between two actions or at the end of one."""
        self._count()
        assert not any(len(live) for live in self.outputs.values()), "outputs outlive their send"


def tables(pipeline, stages):
    """Returns a plan of twelve layers, including a head."""
    model = {"factory": "pp_parts:chain", "options": {"widths": [4] * 11}}
    layout = {"parallel": {"pp": stages, "dp": 1}, "pipeline": pipeline, "partition": {"use": "pp.uniform"}}
    return small_plan(model=model, data={"factory": "pp_parts:Rows"}, batch__micro_size=1, run__steps=1000, **layout)


def batch_of(micros):
    from pp_parts import sample

    samples = [sample(at) for at in range(micros)]
    return {name: torch.stack([one[name] for one in samples]) for name in ("tokens", "labels")}


def measure_peaks(pipelines, stages, numbers, folder):
    """Returns this rank's measured peaks, {schedule: {microbatches: (pairs, graphs)}}."""
    found = {}
    for name, pipeline in pipelines.items():
        with running(tables(pipeline, stages), folder) as run:
            watch = Watch(run)
            found[name] = {}
            for micros in (*numbers, numbers[0]):
                run.step(batch_of(micros))
                found[name][micros] = watch.take()
    return found


def simulate_peaks(pipeline, stages, micros, folder):
    """Returns the simulate_peaks peaks of every stage, [(pairs, graphs)]."""
    schedule = plan_from_dict(tables(pipeline, stages), folder).pipeline.build()
    placement = schedule.placement(stages)
    lists = lower(schedule.lists(stages, micros), placement, micros)
    return [(held.pairs, held.graphs) for held in simulate(lists, placement, Costs.uniform(placement.num_positions)).peaks]


@pytest.mark.parametrize(
    ("stages", "numbers", "names"),
    [
        (2, (1, 5), list(SCHEDULES)[2:]),
        *(pytest.param(stages, MORE_MICROS, list(SCHEDULES), marks=pytest.mark.campaign) for stages in (2, 3, 4)),
    ],
)
def test_peaks_equal_the_simulation(ranks, own, stages, numbers, names):
    pipelines = {name: SCHEDULES[name] for name in names}
    everyone = ranks(stages, 180)(measure_peaks, pipelines, stages, numbers, own)
    wrong = []
    for name, pipeline in pipelines.items():
        for micros in numbers:
            wanted, found = simulate_peaks(pipeline, stages, micros, own), [rank[name][micros] for rank in everyone]
            if wanted != found:
                wrong.append((name, micros, wanted, found))
    assert not wrong, wrong[:5]
