"""`train-cli env`: what a report of a problem needs to say about the machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Any

import typer

from train_cli.options import FormatOption, OutputFormat
from train_cli.surroundings import num_cores
from train_cli.versions import sley_versions

_VARIABLES = ("SLEY_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_", "MALLOC_")
"""Prefixes of the environment variables that change a run; others are private and not printed."""


def env(form: FormatOption = OutputFormat.text) -> None:
    """Print versions and devices, to paste into an issue."""
    found = {**_machine(), **_torch(), **sley_versions(), **_variables()}
    if form is OutputFormat.json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        typer.echo(f"{name:{width}}  {value}")


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "cores": num_cores(),
    }


def _torch() -> dict[str, Any]:
    """Returns versions of torch, CUDA and NCCL, and the names of the GPUs."""
    try:
        import torch
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}"}
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch has no types here
        found["nccl"] = ".".join(map(str, nccl))
        for number in range(torch.cuda.device_count()):
            found[f"gpu {number}"] = torch.cuda.get_device_name(number)
    return found


def _variables() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
