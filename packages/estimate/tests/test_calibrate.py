"""Tests calibration: the measured figures, their use in estimates, and the machine file."""

import pytest

from sley_core.comm.world import World
from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_estimate.calibrate.bench import measure_layers
from sley_estimate.calibrate.device import HostOptimizerBench, fit_saturation, measure_host_bandwidth
from sley_estimate.calibrate.links import LARGE_BYTES, SMALL_BYTES, fit_link, measure_links
from sley_estimate.layers.times import estimate_layers
from sley_estimate.machine import LinksTable, collective_cost, load_machine, machine_from_dict, machine_text, message_cost
from sley_estimate.testing import short_calibration, small_machine
from sley_testing.drawn_copies import DrawnDevice
from sley_testing.plans import small_plan
from sley_trainer.assemble import build_meta_model

SMALL = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
SIZES = (1e6, 1e7, 1e8, 1e9)


def test_saturation_is_fitted_to_exact_times() -> None:
    assert fit_saturation([(n, (n + 3e7) / 2e12) for n in SIZES]) == pytest.approx({"flops_per_s": 2e12, "half_flops": 3e7})


@pytest.mark.parametrize(("kind", "rounds", "size"), [("sum", 2 * 3, 4), ("gather", 3, 4), ("send", 1, 2), ("swap", 1, 4)])
def test_latency_and_bandwidth_are_fitted_to_exact_times(kind, rounds, size) -> None:
    share = {"send": 1.0, "swap": (size - 1) / size}.get(kind, rounds / size)

    def seconds(num_bytes):
        return rounds * 2e-5 + share * num_bytes / 3e9

    link = fit_link(seconds(SMALL_BYTES), seconds(LARGE_BYTES), kind, size)
    assert link == pytest.approx({"latency_s": 2e-5, "bandwidth": 3e9})
    table = LinksTable.model_validate({"ranks_per_host": size, "same_host": {**link, "shared": False}})
    num_bytes = 3 * LARGE_BYTES
    cost = message_cost(num_bytes, 0, 1, table) if kind == "send" else collective_cost(kind, num_bytes, range(size), table)
    assert sum(cost) == pytest.approx(seconds(num_bytes)), "estimates invert the fit"


def links_of(timeout_s):
    with World.join("cpu") as world, short_calibration():
        return measure_links(world, timeout_s)


def test_links_are_equal_on_all_ranks(ranks) -> None:
    first, second = ranks(2)(links_of, 30.0)
    assert first == second
    link = machine_from_dict(small_machine(links=first)).links.same_host
    assert all(getattr(link, kind).bandwidth > 1e6 for kind in ("sum", "gather", "reduce", "swap", "send"))


def test_distinct_layers_are_timed_once_and_price_all_layers() -> None:
    plan = plan_from_dict(small_plan(data=SMALL, model__num_layers=3))
    with World.alone("cpu") as world, short_calibration():
        tables = measure_layers(plan, world.device)
    assert [table["name"] for table in tables] == ["embed", "blocks.0", "head"]
    assert min(table[key] for table in tables for key in ("forward", "backward", "input_gradient")) > 0
    machine = machine_from_dict(small_machine(layers=tables))
    dataset = open_dataset(plan.data, DataContext(0, "train"))
    priced = estimate_layers(plan, build_meta_model(plan, dataset.info), dataset, machine)
    assert [layer.name for layer in priced] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert all(layer.source == "measured" for layer in priced)
    assert priced[1].seconds == priced[3].seconds
    assert tables[1]["output_bytes"] == 2 * 24 * 16 * 8


@pytest.mark.parametrize("order", range(3))
def test_host_optimizer_waits_for_its_copies(order: int) -> None:
    """Gradients arrive before their step, and each bucket returns as it was rounded."""
    device = DrawnDevice(copy_seed=order)
    with short_calibration(), device.watching():
        bench = HostOptimizerBench(device)
        assert bench.step() > 0
        first_values = [float(parameter.detach()[0]) for parameter in bench.parameters]
        bench.step()
    assert len(set(first_values)) == 1
    assert first_values[0] < 1.0, "a step against a gradient of 1"
    for parameter in bench.parameters:
        assert parameter.detach().unique().numel() == 1
        assert float(parameter.detach()[0]) < first_values[0]
    assert bench.device_weights.equal(bench.parameters[-1].detach().bfloat16())
    with short_calibration():
        assert 1e6 < measure_host_bandwidth(DrawnDevice()) < 1e13


# -- the machine file --------------------------------------------------------------------------------------------------


GOOD = """\
format = 1

[device]
name = "Abacus"
kind = "cuda"
memory = 80_000_000_000
memory_bandwidth = 1.5e12
launch_s = 8e-6

[device.matmul.fp16]
flops_per_s = 2.5e14
half_flops = 1e9

[links]
ranks_per_host = 4
same_host = { latency_s = 1e-5, bandwidth = 2e11 }
other_host = { latency_s = 2e-5, bandwidth = 2.5e10, shared = true }

[host]
to_host = 2e10
to_device = 2e10

[engine]
step_s = 1e-3
parameter_s = 2e-5
micro_s = 2e-4
gradient_s = 1e-5
"""


def read(tmp_path, text):
    file = tmp_path / "machine.toml"
    file.write_text(text)
    return load_machine(file)


def test_written_machine_is_read_back(tmp_path):
    machine = read(tmp_path, GOOD)
    assert machine.device.matmul.fp16.half_flops == 1e9
    assert machine.links.other_host.shared
    assert machine.engine.step_seconds(100, 4) == pytest.approx(1e-3 + 2e-3 + 4 * (2e-4 + 1e-3))
    assert read(tmp_path, machine_text(machine)) == machine


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("format = 1", "format = 2", "wrong-type", 1),
        ("format = 1", "", "missing-key", 0),
        ("1.5e12", "-1.5e12", "out-of-range", 7),
        ("1.5e12", "1e30", "out-of-range", 7),
        ("1.5e12", "nan", "out-of-range", 7),
        ("1.5e12", '"fast"', "wrong-type", 7),
        ("launch_s = 8e-6", "launch_s = 8", "out-of-range", 8),
        ("launch_s = 8e-6", "launch_us = 8", "unknown-key", 8),
        ("launch_s = 8e-6\n", "", "missing-key", 3),
        ("flops_per_s = 2.5e14", "flops_per_s = 250", "out-of-range", 11),
        ("matmul.fp16", "matmul.int4", "unknown-key", 10),
        ("latency_s = 1e-5", "latency_s = -1", "out-of-range", 16),
        ("ranks_per_host = 4", "ranks_per_host = 0", "out-of-range", 15),
    ],
)
def test_invalid_value_is_refused_with_its_line(tmp_path, old, new, code, line):
    with pytest.raises(PlanError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    by_code = {diagnostic.code: diagnostic for diagnostic in caught.value.diagnostics}
    assert by_code[code].place.line == line
    assert by_code[code].hint or code in ("out-of-range", "wrong-type", "wrong-value")


def test_missing_file_has_a_hint(tmp_path):
    with pytest.raises(PlanError) as caught:
        load_machine(tmp_path / "none.toml")
    assert caught.value.diagnostics[0].code == "machine-unreadable"
    assert "calibrate" in caught.value.diagnostics[0].hint
