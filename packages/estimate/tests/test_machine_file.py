"""A machine file is read or refused, with the line and a hint."""

from __future__ import annotations

import pytest

from sley_core.errors import PlanError
from sley_estimate.machine import load_machine, machine_from_dict, machine_text
from sley_estimate.testing import small_machine

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


def test_what_is_written_is_what_is_read(tmp_path):
    machine = read(tmp_path, GOOD)
    assert machine.device.matmul.fp16.half_flops == 1e9
    assert machine.links.other_host.shared
    assert machine.engine.seconds(100, 4) == pytest.approx(1e-3 + 2e-3 + 4 * (2e-4 + 1e-3))
    assert read(tmp_path, machine_text(machine)) == machine


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ("format = 1", "format = 2", "machine-format", 1),
        ("format = 1", "format = true", "machine-format", 1),
        ("format = 1", "", "machine-format", 0),
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
def test_what_no_machine_has_is_refused_at_its_line(tmp_path, old, new, code, line):
    with pytest.raises(PlanError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    found = caught.value.diagnostics
    assert code in {one.code for one in found}, found
    first = next(one for one in found if one.code == code)
    assert first.place.line == line
    assert first.hint or code in ("out-of-range", "wrong-type", "wrong-value")


def test_a_file_that_is_not_there_is_told_with_how_to_make_one(tmp_path):
    with pytest.raises(PlanError) as caught:
        load_machine(tmp_path / "none.toml")
    assert caught.value.diagnostics[0].code == "machine-missing"
    assert "calibrate" in caught.value.diagnostics[0].hint


def test_a_layer_stands_there_once():
    seconds = dict.fromkeys(("forward", "backward", "input_gradient", "weight_gradient"), 1.0)
    layer = {"key": "0" * 16, "name": "x", "output_bytes": 8, **seconds}
    tables = {
        "format": 1,
        "device": {"name": "a", "kind": "cpu", "memory_bandwidth": 1e9, "launch_s": 0.0, "matmul": {}},
        "layers": [layer, layer],
    }
    with pytest.raises(PlanError, match="twice"):
        machine_from_dict(tables)


def test_a_cpu_runs_ahead_of_no_device():
    engine = {"step_s": 1e-3, "parameter_s": 2e-5, "micro_s": 2e-4, "gradient_s": 1e-5}
    with pytest.raises(PlanError, match="ahead of no device"):
        machine_from_dict(small_machine(device__kind="cpu", engine=engine))
