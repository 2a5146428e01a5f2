"""Makes tables of a small machine file for tests of estimates and searches, changed by keyword.

    machine = machine_from_dict(small_machine(links__ranks_per_host=2))
    (folder / "machine.toml").write_text(tomli_w.dumps(small_machine()), "utf-8")

Since core 0.2.
"""

from __future__ import annotations

from typing import Any

from sley_core.testing.plans import Tables, changed

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
