"""Measures searches for a Llama on 1,024 ranks, in seconds of the clock and CPU seconds of all processes.

The plan has 1,024 samples of 4,096 tokens per step in bf16, and hosts of eight 80 GiB devices with one network card of 22 GB/s.
The search covers all axes, and the best layouts run their own steps on all cores.

Target: 180 s on two cores.
"""

import argparse
import resource
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sley_core.plan.load import plan_from_dict
from sley_estimate.machine import machine_from_dict
from sley_estimate.search.find import rank_layouts, search_layouts
from sley_estimate.search.layouts import Layouts, list_choices
from train_cli.environment import num_cores

GIB = 1 << 30
TARGET_S = 180.0
MODELS: dict[str, dict[str, Any]] = {
    "16 blocks of 2048": {"num_layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn_hidden": 8192},
    "80 blocks of 8192": {"num_layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672},
}
VOCABULARY = 128256
DEVICES: dict[str, dict[str, float]] = {
    "such as an A100": {"flops_per_s": 2.5e14, "bandwidth": 2.0e12, "between": 2e11, "to_host": 2.5e10},
    "such as an H100": {"flops_per_s": 6e14, "bandwidth": 2.5e12, "between": 3e11, "to_host": 5e10},
}
"""Products per second, bytes per second of memory, between ranks of a host, and to the host."""


def build_machine(name: str) -> Any:
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
        "host": {"to_host": device["to_host"], "to_device": device["to_host"], "latency_s": 1e-5, "memory_bandwidth": 2e11},
    }
    return machine_from_dict(tables)


def cpu_s() -> float:
    """Returns the CPU seconds of this process and of those that it started."""
    usages = [resource.getrusage(processes) for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def build_plan(model: dict[str, Any], folder: Path) -> Any:
    """Returns the plan of a model over a file of tokens, which this writes into `folder`."""
    np.zeros(1 << 16, dtype=np.uint32).tofile(folder / "tokens.bin")
    tables = {
        "run": {"name": "search", "steps": 1, "device": "cuda"},
        "model": {"use": "models.llama", **model},
        "data": {"use": "data.tokens", "files": ["tokens.bin"], "dtype": "uint32", "sequence": 4096, "vocab_size": VOCABULARY},
        "batch": {"global_size": 1024, "micro_size": 1},
        "optimizer": {"use": "core.adamw", "lr": 1e-4},
        "precision": {"compute": "bf16"},
    }
    return plan_from_dict(tables, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=1024, help="ranks (default 1024)")
    parser.add_argument("--rough", action="store_true", help="rank layouts by the formula only")
    options = parser.parse_args()
    for model, device in product(MODELS, DEVICES):
        with tempfile.TemporaryDirectory() as folder:
            plan = build_plan(MODELS[model], Path(folder))
            start_s, start_cpu_s = time.perf_counter(), cpu_s()
            space = Layouts(plan, options.world, list_choices(plan))
            machine = build_machine(device)
            if options.rough:
                result, *_ = rank_layouts(space, machine, 80 * GIB)
            else:
                result = search_layouts(space, machine, max_bytes=80 * GIB, cores=num_cores())
            clock_s, used_cpu_s = time.perf_counter() - start_s, cpu_s() - start_cpu_s
        print(f"{model}, devices {device}: {clock_s:.0f} s, {used_cpu_s:.0f} CPU seconds")
        print(f"  {result.num_layouts:,} layouts, {result.num_too_large:,} too large, {result.num_verified} by their own steps")
        for fast in result.fastest_layouts[:2]:
            print(f"    {fast.seconds:8.4g} s {fast.num_bytes / GIB:6.1f} GiB  {fast.layout}")
    print(f"target: {TARGET_S:.0f} s on two cores")


if __name__ == "__main__":
    main()
