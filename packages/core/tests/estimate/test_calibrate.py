"""What calibration makes of times, and what it measures on this machine: figures that a machine file takes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import draft_model
from sley_core.engine.on_meta import meta_micro_batch
from sley_core.errors import PlanError
from sley_core.estimate.calibrate import device as devices
from sley_core.estimate.calibrate import machine as machines
from sley_core.estimate.calibrate.device import measure_device, saturation
from sley_core.estimate.calibrate.layers import measure_layers
from sley_core.estimate.calibrate.links import FEW, MANY, measure_links, way
from sley_core.estimate.calibrate.machine import measure
from sley_core.estimate.layers.of_plan import priced_layers
from sley_core.estimate.machine.read import machine_from_dict
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.testing.plans import small_plan

SMALL = {"use": "core.text", "source": "python-stdlib", "sequence": 24}
SIZES = (1e6, 1e7, 1e8, 1e9)


def test_the_law_of_products_is_found_from_its_own_times() -> None:
    found = saturation([(n, (n + 3e7) / 2e12) for n in SIZES])
    assert found["flops_per_s"] == pytest.approx(2e12)
    assert found["half_flops"] == pytest.approx(3e7)


def test_products_that_get_slower_with_size_have_no_negative_constant() -> None:
    found = saturation([(n, n / 2e12 * (1 + n / 1e9)) for n in SIZES])
    assert found["half_flops"] == 0.0
    assert 1e12 < found["flops_per_s"] < 2e12


@pytest.mark.parametrize(("kind", "rounds", "size"), [("sum", 2 * 3, 4), ("gather", 3, 4), ("send", 1, 2)])
def test_latency_and_bandwidth_are_found_from_their_own_times(kind, rounds, size) -> None:
    share = 1.0 if kind == "send" else rounds / size

    def seconds(num_bytes):
        return rounds * 2e-5 + share * num_bytes / 3e9

    found = way(seconds(FEW), seconds(MANY), rounds, kind, size)
    assert found == pytest.approx({"latency_s": 2e-5, "bandwidth": 3e9})


def test_this_device_has_figures_that_a_machine_file_takes(monkeypatch) -> None:
    monkeypatch.setattr(devices, "SIZES", {"cpu": (32, 64)})
    monkeypatch.setattr(devices, "MOVED_BYTES", {"cpu": 1 << 20})
    with World.alone("cpu") as world:
        machine = machine_from_dict({"format": 1, "device": measure_device(world.device)})
    assert machine.device.matmul.fp32.flops_per_s > 1e7
    assert machine.device.kind == "cpu"


def links_of(timeout_s):
    with World.join("cpu") as world:
        return measure_links(world, timeout_s)


def test_links_are_measured_alike_on_all_ranks(ranks) -> None:
    first, second = ranks(2)(links_of, 30.0)
    assert first == second
    machine = {
        "format": 1,
        "device": {"name": "x", "kind": "cpu", "memory_bandwidth": 1e9, "launch_s": 0.0, "matmul": {}},
    }
    same = machine_from_dict({**machine, "links": first}).links.same_host
    assert all(getattr(same, kind).bandwidth > 1e6 for kind in ("sum", "gather", "reduce", "send"))


def machine_of_two() -> tuple[bool, int]:
    """Whether this rank has the machine, and how many layers it has timed."""
    num_timed = []

    def counted(plan: Plan, device: Device) -> list[dict[str, Any]]:
        num_timed.extend(found := measure_layers(plan, device))
        return found

    with World.join("cpu") as world, patch.object(machines, "measure_layers", counted):
        return measure(world, plan_from_dict(small_plan(data=SMALL)), 30.0) is not None, len(num_timed)


def test_ranks_that_share_a_host_time_layers_at_once(ranks) -> None:
    """Alone on the machine, layers of real compute take less than in a run."""
    assert ranks(2)(machine_of_two) == [(True, 3), (False, 3)]


def test_layers_that_attend_to_slices_of_other_ranks_are_not_timed_alone() -> None:
    """It was a KeyError, of a field that only a slice has."""
    plan = plan_from_dict(small_plan(parallel={"sp": 2}))
    with World.alone("cpu") as world, pytest.raises(PlanError, match="measure without `--plan`") as raised:
        measure(world, plan, 30.0)
    assert raised.value.diagnostics[0].code == "calibrate-sequence"


def test_layers_of_a_plan_are_timed_once_each_and_priced_so() -> None:
    plan = plan_from_dict(small_plan(data=SMALL, model__num_layers=3))
    with World.alone("cpu") as world:
        tables = measure_layers(plan, world.device)
    assert [table["name"] for table in tables] == ["embed", "blocks.0", "head"]
    assert min(table[key] for table in tables for key in ("forward", "backward", "input_gradient")) > 0
    bare = {"name": "x", "kind": "cpu", "memory_bandwidth": 1e9, "launch_s": 0.0, "matmul": {}}
    machine = machine_from_dict({"format": 1, "device": bare, "layers": tables})
    dataset = open_dataset(plan.data, DataContext(0, "train"))
    model = draft_model(plan, dataset.info)
    priced = priced_layers(plan, model, meta_micro_batch(plan, dataset), machine)
    assert [one.name for one in priced] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert all(one.is_measured for one in priced)
    assert priced[1].seconds == priced[3].seconds
    assert priced[1].output_bytes == 2 * 24 * 16 * 8
