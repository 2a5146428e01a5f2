from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from sley_core.comm.device import Device
from sley_core.model.attention import once_per_field


class Counted:
    """`compute` that counts its calls."""

    def __init__(self, field: Tensor) -> None:
        self.field = weakref.ref(field)
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        field = self.field()
        assert field is not None
        return field * 2.0


def test_a_value_is_computed_once_per_field_and_purpose() -> None:
    field = torch.arange(3)
    compute = Counted(field)
    assert once_per_field(field, "double", compute) is once_per_field(field, "double", compute)
    assert compute.calls == 1
    once_per_field(field, "other", compute)
    once_per_field(field.clone(), "double", compute)
    assert compute.calls == 3


def test_a_field_that_was_written_to_is_computed_anew() -> None:
    field = torch.arange(3)
    compute = Counted(field)
    once_per_field(field, "double", compute)
    field += 1
    assert once_per_field(field, "double", compute).tolist() == [2.0, 4.0, 6.0]


def test_a_value_does_not_outlive_its_field() -> None:
    field = torch.arange(3)
    value = weakref.ref(once_per_field(field, "double", Counted(field)))
    assert value() is not None
    del field
    gc.collect()
    assert value() is None


def test_nothing_from_inference_mode_reaches_a_graph() -> None:
    field = torch.arange(3.0)
    with torch.inference_mode():
        assert once_per_field(field, "double", Counted(field)).is_inference()
        made_there = torch.arange(3)
        once_per_field(made_there, "double", Counted(made_there))
    assert not once_per_field(field, "double", Counted(field)).is_inference()


def test_a_value_has_no_gradient_history() -> None:
    field = torch.arange(3.0)
    weight = torch.ones(3, requires_grad=True)
    assert not once_per_field(field, "weighted", lambda: field * weight).requires_grad


def test_what_is_cached_for_a_moved_field_ends_with_it_though_the_batch_stays() -> None:
    """On a CPU too, where a micro-batch is where it was."""
    batch = torch.arange(6)
    moved = Device.pick("cpu").move(batch)
    table = weakref.ref(once_per_field(moved, "double", Counted(moved)))
    assert moved.data_ptr() == batch.data_ptr()
    del moved
    gc.collect()
    assert table() is None
