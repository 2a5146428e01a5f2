"""What crosses a boundary: tuples with and without gradients, changing shapes, and what must not."""

from __future__ import annotations

import time

import pytest
import torch

import sley_pp.link
from sley_core.errors import RunError
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import small_plan
from sley_testing.runs import record

MODULE = '''
import torch
from torch import nn
from sley_core.data.dataset import DataInfo, Field

FIELDS = {"x": Field("float64", sequence_dim=1), "y": Field("float64", sequence_dim=1)}


class Data:
    info = DataInfo(FIELDS)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x, y = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": x, "y": y}


class Squares:
    fields = ("y",)

    def weight(self, batch):
        return float(batch["y"].numel())

    def loss(self, output, batch):
        return (output - batch["y"]).square().sum()


class First(nn.Module):
    """A tuple: hidden with a gradient, a mask without one, and a transposed (not contiguous) auxiliary one in a dict."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.inner(x)
        return hidden, x > 0, {"aux": hidden.transpose(1, 2).float(), "nothing": None}


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, state):
        hidden, mask, more = state
        assert mask.dtype == torch.bool and not mask.requires_grad and more["nothing"] is None
        hidden = torch.where(mask, self.inner(hidden).tanh(), hidden) + more["aux"].transpose(1, 2).double()
        return hidden, mask, more


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, state):
        return self.inner(state[0])


class Moody(Last):
    """Returns another dtype from its second call on: what crosses may not depend on anything but shapes."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        hidden = self.inner(x)
        return (hidden if self.calls < 2 else hidden.float(),)


class Inputs(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x)


class Views(nn.Module):
    """Returns two halves of one tensor that autograd keeps, one of them twice."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 8)

    def forward(self, hidden):
        both = torch.exp(self.wide(hidden).tanh())
        return both[..., :4], both[..., 4:], both[..., :4]


class Joins(Last):
    def forward(self, parts):
        one, two, three = parts
        return self.inner(one * two + three.mul(2).sin())


def views():
    return [("first", Inputs()), ("second", Views()), ("last", Joins())]


def layers():
    return [("first", First()), ("middle", Middle()), ("last", Last())]


def frozen():
    made = layers()
    for parameter in made[0][1].parameters():
        parameter.requires_grad_(False)
    return made


def moody():
    return [("first", Moody()), ("last", Last())]
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "crossing_of_a_test.py").write_text(MODULE)
    return tmp_path


def plan(factory, stages=1, schedule="pp.one_f_one_b"):
    tables = small_plan(
        model={"factory": f"crossing_of_a_test:{factory}"},
        data={"factory": "crossing_of_a_test:Data"},
        loss={"factory": "crossing_of_a_test:Squares"},
        optimizer={"use": "core.sgd", "lr": 0.1},
    )
    if stages > 1:
        tables |= {"parallel": {"dp": 1, "pp": stages}, "pipeline": {"use": schedule}}
    return tables


def assert_equal(reference, layouts):
    for layout in layouts:
        for one, other in zip(reference.gradients, layout.gradients, strict=True):
            assert_close_gradients({name: one[name] for name in other}, other, 1e-6)
        for wanted, found in zip(reference.rows, layout.rows, strict=True):
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("factory", ["layers", "frozen"])
@pytest.mark.parametrize("schedule", ["pp.one_f_one_b", "pp.zero_bubble_h1"])
def test_tuples_dicts_and_boundaries_without_a_gradient(ranks, folder, factory, schedule):
    reference = record(plan(factory), 3, folder=folder)
    assert_equal(reference, ranks(3)(record, plan(factory, 3, schedule), 3, folder=folder))


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["pp.one_f_one_b", "pp.gpipe", "pp.zero_bubble_h1"])
def test_views_are_sent_as_they_are_and_what_they_view_stays(ranks, folder, schedule):
    """An output gives its storage back when it is sent (`test_live`), and autograd keeps what it kept."""
    tables = plan("views", 2, schedule) | {"partition": {"use": "pp.explicit", "layers": [2, 1]}}
    assert_equal(record(plan("views"), 3, folder=folder), ranks(2)(record, tables, 3, folder=folder))


def batches():
    """Three batches of different length."""
    made = []
    for length in (5, 2, 5):
        x, y = torch.randn(2, 8, length, 4, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
        made.append({"x": x, "y": y})
    return made


def test_shapes_that_change_are_announced(ranks, folder):
    reference = record(plan("layers"), 3, folder=folder, batches=batches())
    layouts = ranks(2)(record, plan("layers", 2), 3, folder=folder, batches=batches())
    assert_equal(reference, layouts)


def ragged(step):
    """Four micro-batches of a step, each of a length of its own; in the second step in another order."""
    made = []
    for micro, length in enumerate((5, 2, 7, 3) if step % 2 == 0 else (3, 5, 5, 2)):
        generator = torch.Generator().manual_seed(10 * step + micro)
        x, y = torch.randn(2, 2, length, 4, generator=generator, dtype=torch.float64)
        made.append({"x": x, "y": y})
    return made


@pytest.mark.sample(2)
@pytest.mark.parametrize(("stages", "schedule"), [(2, "pp.one_f_one_b"), (2, "pp.gpipe"), (3, "pp.zero_bubble_h1")])
def test_micro_batches_of_a_step_may_differ_in_length(ranks, folder, stages, schedule):
    """Shapes are announced once per length, and receives posted ahead of time from then on."""
    steps = [ragged(step) for step in range(3)]
    reference = record(plan("layers"), 3, folder=folder, batches=steps)
    assert_equal(reference, ranks(stages)(record, plan("layers", stages, schedule), 3, folder=folder, batches=steps))


def test_ragged_micro_batches_on_replicas(ranks, folder):
    """Replicas have other lengths than one another in the same step."""
    steps = [ragged(step) for step in range(3)]
    tables = plan("layers", 2) | {"parallel": {"dp": 2, "pp": 2}}
    reference = record(plan("layers"), 3, folder=folder, batches=steps)
    assert_equal(reference, ranks(4)(record, tables, 3, folder=folder, batches=steps))


def mismatch(tables, folder, apart):
    if apart:
        sley_pp.link.heads_are_apart = lambda device: True
    start_s = time.monotonic()
    try:
        record(tables, 1, folder=folder)
    except RunError as error:
        return error.diagnostics[0].code, error.diagnostics[0].message, time.monotonic() - start_s
    return None


@pytest.mark.parametrize(
    ("device", "apart"), [("cpu", False), ("cpu", True), pytest.param("cuda", False, marks=pytest.mark.gpu)]
)
def test_a_mismatch_is_told_on_both_sides(ranks, folder, device, apart):
    """Before anything is computed of it: heads lie in front of their tensors, or travel on the host."""
    tables = plan("moody", 2)
    tables["run"]["device"] = device
    sender, receiver = ranks(2, 30)(mismatch, tables, folder, apart)
    for code, message, seconds in (sender, receiver):
        assert code == "boundary-mismatch"
        assert seconds < 10
        assert "micro-batch 1" in message
        assert "expected float64[2, 5, 4] with gradient, came float32[2, 5, 4] with gradient" in message
    assert "stage 0 sends to stage 1, forward" in sender[1]
    assert "stage 1 takes from stage 0, forward" in receiver[1]
