"""How long a search at a glance takes: a Llama on 1,024 ranks, in CPU seconds of this process.

The plan: 1,024 samples of 4,096 tokens a step in bf16, hosts of eight with one network card of 22 GB/s, 80 GiB. All axes are
searched. "known" is a second search in the same process: its layers were traced by the first, as if the machine file had them.

Target: 10 s once the layers' costs are known.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sley_core.plan.load import plan_from_dict
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.search.choices import choices_of
from sley_estimate.search.find import find
from sley_estimate.search.layouts import Layouts
from sley_estimate.search.quick import Quick

GIB = 1 << 30
TARGET_S = 10.0
MODELS: dict[str, dict[str, Any]] = {
    "16 blocks of 2048": {"num_layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn_hidden": 8192},
    "80 blocks of 8192": {"num_layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672},
}
VOCABULARY = 128256
DEVICES: dict[str, dict[str, float]] = {
    "such as an A100": {"flops_per_s": 2.5e14, "bandwidth": 2.0e12, "between": 2e11, "to_host": 2.5e10},
    "such as an H100": {"flops_per_s": 6e14, "bandwidth": 2.5e12, "between": 3e11, "to_host": 5e10},
}
"""Products per second, bytes per second of memory, between ranks of a host, and to the host. With the faster products more of a
step is exchanges, of which bounds know less.
"""


def machine_of(name: str) -> Any:
    """Returns the machine file of hosts with eight such devices and one network card."""
    device = DEVICES[name]
    products = {"flops_per_s": device["flops_per_s"], "half_flops": 1e10}
    tables = {
        "format": 1,
        "device": {
            "name": name,
            "kind": "cuda",
            "memory_bandwidth": device["bandwidth"],
            "launch_s": 5e-6,
            "matmul": {"bf16": products, "fp32": products},
        },
        "links": {
            "ranks_per_host": 8,
            "same_host": {"latency_s": 1e-5, "bandwidth": device["between"]},
            "other_host": {"latency_s": 2e-5, "bandwidth": 22e9, "shared": True},
        },
        "host": {
            "to_host": device["to_host"],
            "to_device": device["to_host"],
            "latency_s": 1e-5,
            "memory_bandwidth": 2e11,
        },
    }
    return machine_from_dict(tables)


Found = TypeVar("Found")


def timed(name: str, work: Callable[[], Found]) -> Found:
    """Returns what `work` returns, and prints the CPU seconds that it took."""
    began = time.process_time()
    found = work()
    print(f"  {name:42}{time.process_time() - began:7.1f} s", flush=True)
    return found


def plan_of(model: dict[str, Any], folder: Path) -> Any:
    """Returns the plan of a model over a file of tokens, which this writes into `folder`."""
    np.zeros(1 << 16, dtype=np.uint32).tofile(folder / "tokens.bin")
    tables = {
        "run": {"name": "search", "steps": 1, "device": "cuda"},
        "model": {"use": "models.llama", **model},
        "data": {
            "use": "data.tokens",
            "files": ["tokens.bin"],
            "dtype": "uint32",
            "sequence": 4096,
            "vocab_size": VOCABULARY,
        },
        "batch": {"global_size": 1024, "micro_size": 1},
        "optimizer": {"use": "core.adamw", "lr": 1e-4},
        "precision": {"compute": "bf16"},
    }
    return plan_from_dict(tables, folder)


def searched(plan: Any, world: int, quick: Quick) -> Any:
    return find(Layouts(plan, world, choices_of(plan)), quick, memory=80 * GIB, verify=False)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--world", type=int, default=1024, help="ranks (default 1024)")
    world = options.parse_args().world
    for model, device in product(MODELS, DEVICES):
        print(f"{model}, devices {device}")
        machine = machine_of(device)
        with tempfile.TemporaryDirectory() as folder:
            plan = plan_of(MODELS[model], Path(folder))
            first = timed("the model and its data", partial(Quick, plan, world, machine))
            timed("the five fastest and the front", partial(searched, plan, world, first))
            again = Quick(plan, world, machine)
            again.tables = again.shared.tables = first.tables  # its layers are known, and nothing else
            found = timed("the same, layers known", partial(searched, plan, world, again))
        tally = found.tally
        print(f"  {tally.num_layouts:,} layouts, {tally.simulated:,} simulated, {tally.too_large:,} seen not to fit")
        for seen in (*(final.seen for final in found.fastest[:2]), *found.front[:2]):
            print(f"    {seen.estimate.seconds:8.4g} s {seen.estimate.num_bytes / GIB:6.1f} GiB  {seen.layout}")
    print(f"target of the third figure: {TARGET_S:.0f} s")


if __name__ == "__main__":
    main()
