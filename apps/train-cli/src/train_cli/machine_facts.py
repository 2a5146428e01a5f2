"""Collects what can change a run beside its plan: versions, devices and environment variables."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import distributions
from typing import Any

from train_cli.surroundings import num_cores

_GROUPS = ("[sley.plugins]", "[sley.commands]")
_VARIABLES = ("SLEY_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_", "MALLOC_")
"""Prefixes of the environment variables that change a run; others are private and not told."""


def machine_facts(*, names_gpus: bool = True) -> dict[str, Any]:
    """Returns platform, Python, cores, versions of torch and of Sley's packages, GPUs and variables, by name.

    names_gpus: whether the GPUs are looked at, which makes a CUDA context in this process.
    """
    return {**_machine(), **_torch(names_gpus), **sley_versions(), **_variables()}


def _machine() -> dict[str, Any]:
    return {"platform": platform.platform(), "python": f"{platform.python_version()} ({sys.executable})", "cores": num_cores()}


def _torch(names_gpus: bool) -> dict[str, Any]:
    """Returns versions of torch, CUDA and NCCL, and the names of the GPUs."""
    try:
        import torch
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}"}
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if names_gpus and torch.cuda.is_available():
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch has no types here
        found["nccl"] = ".".join(map(str, nccl))
        for number in range(torch.cuda.device_count()):
            found[f"gpu {number}"] = torch.cuda.get_device_name(number)
    return found


def _variables() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def sley_versions() -> dict[str, str]:
    """Returns versions by distribution, sorted by name; reads metadata only."""
    found: dict[str, str] = {}
    for dist in distributions():
        name = dist.metadata["Name"] or ""
        text = "" if name.startswith("sley-") else dist.read_text("entry_points.txt") or ""
        if name.startswith("sley-") or any(group in text for group in _GROUPS):
            # What is met first on sys.path is what an import finds.
            found.setdefault(name, dist.version)
    return dict(sorted(found.items()))
