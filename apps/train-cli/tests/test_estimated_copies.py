"""Copies to the host: as many bytes as a run copies, and as long as arithmetic says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.rank import rank_bytes
from sley_estimate.bytes.stages import first_draft
from sley_estimate.machine import MachineFile, machine_from_dict
from sley_estimate.step.estimate import estimate_seconds, records_of
from sley_estimate.step.programs import Records, seconds_of_records
from sley_estimate.step.record import HOST, Began
from sley_estimate.testing import small_machine
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import record

RATE = 1e9
"""Bytes per second."""
AT_ONCE = 1e15
PLAN = small_plan(batch__global_size=2, precision={"compute": "bf16"})
STATES = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.002}
OPTIMIZER = {"use": "memory.host_optimizer", "bucket_mb": 0.002}
ACTIVATIONS = {"use": "memory.host", "min_bytes": 1}
COPIES: dict[str, Tables] = {
    "between_steps": {"offload": [STATES]},
    "host_optimizer": {"offload": [OPTIMIZER]},
    "memory.host": {"activations": ACTIVATIONS},
    "both": {"offload": [STATES], "activations": ACTIVATIONS},
}


def machine(kind: str = "cuda", *, to_host: float = RATE, to_device: float = RATE, on_host: float = AT_ONCE) -> MachineFile:
    """A machine that computes in no time and copies at these rates."""
    at_once = {"flops_per_s": 1e17}
    host = {"to_host": to_host, "to_device": to_device, "memory_bandwidth": on_host}
    return machine_from_dict(
        small_machine(
            device__kind=kind,
            device__launch_s=0.0,
            device__memory_bandwidth=AT_ONCE,
            device__matmul={"fp32": at_once, "bf16": at_once},
            host=host,
        )
    )


RECORDED: dict[str, Records] = {}
"""Steps that were recorded before, by plan and kind of device: to record one takes far longer than to price it."""


def records(folder: Path, changes: Tables, *, kind: str) -> Records:
    """Returns the recorded step of the plan with `changes`, of one process."""
    key = f"{changes} {kind}"
    if key not in RECORDED:
        plan = plan_from_dict(changed(PLAN, **changes, run__device=kind), folder)
        RECORDED[key] = records_of(plan, 1, first_draft(plan, 1))
    return RECORDED[key]


def seconds(machine_file: MachineFile, folder: Path, **changes: Any) -> float:
    """Returns the seconds of a step of one micro-batch."""
    recorded = records(folder, changes, kind=machine_file.device.kind)
    return seconds_of_records(recorded, 1, machine_file).seconds


def foretold(folder: Path, changes: Tables, *, kind: str) -> dict[str, int]:
    """Bytes that a recorded step copies, each way."""
    found = {"to_host": 0, "to_device": 0}
    (recorded,) = records(folder, changes, kind=kind).ranks
    for word in recorded.step.events:
        if isinstance(word, Began) and word.axis == HOST:
            found[word.kind] += word.num_bytes
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("copies", COPIES)
def test_a_step_copies_as_many_bytes_as_were_foretold(copies: str, texts: Path) -> None:
    tables = changed(PLAN, **COPIES[copies])
    after: list[tuple[float, float]] = []

    def watch(run: Any) -> None:
        def count(_row: object) -> None:
            moved = [each.moved(part) for each in run.memory.managers for part in each.parts]
            policy = run.counts.get("memory.host", {})
            out = sum(one.copied_out for one in moved) + policy.get("moved_bytes", 0)
            after.append((out, sum(one.copied_in for one in moved) + policy.get("fetched_bytes", 0)))

        run.listeners.append(count)

    record(tables, 4, folder=texts, prepare=watch)
    (out, into), (more_out, more_into) = after[-2:]
    assert more_out > out
    assert more_into > into
    told = {"to_host": more_out - out, "to_device": more_into - into}
    assert foretold(texts, COPIES[copies], kind="cpu") == told
    if "activations" not in tables:  # of these a GPU's kernels save something else
        assert foretold(texts, COPIES[copies], kind="cuda") == told


def test_states_that_come_and_go_take_as_long_as_their_bytes(texts: Path) -> None:
    """A bucket leaves while the next one comes: so the slower way counts, and what the first must wait for, or the last."""
    num_bytes = foretold(texts, {"offload": [STATES]}, kind="cuda")["to_host"]
    out = seconds(machine(to_device=AT_ONCE), texts, offload=[STATES])
    into = seconds(machine(to_host=AT_ONCE), texts, offload=[STATES])
    both = seconds(machine(), texts, offload=[STATES])
    assert out == pytest.approx(num_bytes / RATE, rel=1e-3)
    assert into == pytest.approx(num_bytes / RATE, rel=1e-3)
    assert num_bytes / RATE < both < 2 * num_bytes / RATE


def test_a_cpu_copies_by_itself_one_way_after_the_other(texts: Path) -> None:
    num_bytes = sum(foretold(texts, {"offload": [STATES]}, kind="cpu").values())
    assert seconds(machine("cpu"), texts, offload=[STATES]) == pytest.approx(num_bytes / RATE, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "host", "says"),
    [
        ({"offload": [STATES]}, None, r"no `\[host\]`"),
        ({"activations": ACTIVATIONS}, None, r"no `\[host\]`"),
        ({"offload": [OPTIMIZER]}, {"to_host": RATE, "to_device": RATE}, r"no `\[host\] memory_bandwidth`"),
    ],
)
def test_copies_of_which_the_machine_file_says_nothing_are_refused(
    changes: Tables, host: Tables | None, says: str, texts: Path
) -> None:
    rate = {"flops_per_s": 1e12}
    tables = small_machine(device__kind="cuda", device__matmul={"fp32": rate, "bf16": rate}, host=host)
    plan = plan_from_dict(changed(PLAN, **changes), texts)
    with pytest.raises(PlanError, match=says) as caught:
        estimate_seconds(plan, 1, machine_from_dict(tables))
    assert caught.value.diagnostics[0].code == "machine-host"


def test_masters_on_the_host_are_none_of_the_devices_memory(texts: Path) -> None:
    """On a CPU they are: its memory is the host's."""

    def on(device: str, **changes: Any) -> Any:
        return rank_bytes(plan_from_dict(changed(PLAN, run__device=device, **changes), texts), 0, 1)

    here, away = on("cuda"), on("cuda", offload=[OPTIMIZER])
    moved = here.states["masters"] + here.states["optimizer_states"]
    assert moved > 0
    assert away.states["masters"] == away.states["optimizer_states"] == 0
    assert here.peak - away.peak == pytest.approx(moved, rel=0.1)
    assert on("cpu", offload=[OPTIMIZER]).states == on("cpu").states
