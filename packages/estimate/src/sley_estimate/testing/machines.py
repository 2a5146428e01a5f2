"""Makes tables of a small machine file for tests of estimates and searches, changed by keyword.

    machine = machine_from_dict(small_machine(links__ranks_per_host=2))
    (folder / "machine.toml").write_text(tomli_w.dumps(small_machine()), "utf-8")
    machine = machine_from_dict(small_machine(layers=timed_layers(plan, times=2.0)))

Since core 0.2.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sley_core.assemble import draft_model
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_estimate.layers.of_plan import priced_layers
from sley_estimate.machine.read import machine_from_dict
from sley_testing.plans import Tables, changed
from train_cli.on_meta import meta_micro_batch

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

_SMALL: Tables = {
    "format": 1,
    "device": {
        "name": "even",
        "kind": "cuda",
        "memory_bandwidth": 1e11,
        "launch_s": 1e-6,
        "matmul": {"fp32": {"flops_per_s": 1e11}, "fp64": {"flops_per_s": 1e11}},
    },
    "links": {"ranks_per_host": 8, "same_host": {"latency_s": 1e-5, "bandwidth": 1e10}},
}


def small_machine(**changes: Any) -> Tables:
    """Returns the tables of a machine of one host of eight devices, none of its layers timed, with `changes` as in `changed`.

    It multiplies fp32 and fp64, and has no link to another host.
    """
    return changed(_SMALL, **changes)


def timed_layers(plan: Plan, times: float = 1.0, host: float = 0.0, launch_s: float = 1e-6) -> list[Tables]:
    """Returns the tables `[[layers]]` of the small machine as if the layers of `plan` had been timed there.

    times: how much longer each takes than what is counted of it, with `launch_s` for each operator. host: how much longer its
    host takes than the device does.
    """
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model, machine = draft_model(plan, dataset.info), machine_from_dict(small_machine(device__launch_s=launch_s))
    tables = {}
    for one in priced_layers(plan, model, meta_micro_batch(plan, dataset), machine):
        seconds = {name: times * value for name, value in asdict(one.seconds).items()}
        hosts = {f"host_{name}": host * value for name, value in seconds.items() if not name.startswith("host_")}
        tables[one.key] = {"key": one.key, "name": one.name, "output_bytes": one.output_bytes, **seconds, **hosts}
    return [*tables.values()]
