"""Describes the machine and software of a run: cores, versions, devices and environment variables.

Each start of rank 0 writes this description and the origin of each value of the plan to `start.json` in the run folder.
"""

import json
import math
import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath
from typing import Any

from sley_core.errors import format_path
from sley_core.json_text import write_json
from sley_core.plan.plan import Plan, iterate_values

START_FILE = "start.json"
"""The name of the file in a run folder that contains its `StartRecord`."""

_ENTRY_POINT_GROUPS = ("[sley.plugins]", "[sley.commands]")  # the headers of plugins and of commands in `entry_points.txt`
_VARIABLE_PREFIXES = ("SLEY_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_", "MALLOC_")
"""The prefixes of the environment variables to record. Other variables may contain secrets."""


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use under its affinity and cgroup limits, at least 1."""
    return int(min(len(os.sched_getaffinity(0)), max(1.0, read_cgroup_cores(Path("/")))))


def read_cgroup_cores(root: Path) -> float:
    """Returns the smallest CPU limit, in cores, of this process's cgroup (version 2) and the parents of this cgroup; infinity
    if there is no limit. root: the root of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return math.inf
    limits = [math.inf]
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            with suppress(OSError, ValueError):  # the file does not exist, or its limit is "max"
                quota, period = map(float, (root / "sys/fs/cgroup" / group / "cpu.max").read_text("utf-8").split())
                limits.append(quota / period)
    return min(limits)


def describe_machine(*, include_gpus: bool = True) -> dict[str, Any]:
    """Returns a description of this machine, by name: platform, number of cores, GPUs, environment variables, and versions of
    Python, torch and Sley's packages. include_gpus: whether to list the GPUs, which creates a CUDA context in this process.
    """
    python = f"{platform.python_version()} ({sys.executable})"
    info: dict[str, Any] = {"platform": platform.platform(), "python": python, "cores": num_cores()}
    try:
        import torch
    except ImportError as error:
        info["torch"] = f"cannot be imported: {error}"
    else:
        info |= {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
        if include_gpus and torch.cuda.is_available():
            nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch has no types here
            info["nccl"] = ".".join(map(str, nccl))
            info |= {f"gpu {index}": torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLE_PREFIXES)}
    return {**info, **find_sley_versions(), **variables}


def find_sley_versions() -> dict[str, str]:
    """Returns the versions of Sley's packages and of packages with plugins or commands, sorted by name."""
    versions: dict[str, str] = {}
    for dist in distributions():
        # `dist.metadata` would parse the whole text with the package's README, which takes ten times as long.
        header = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "").partition("\n\n")[0]
        fields = dict(re.findall(r"^(Name|Version): *(\S+)", header, re.MULTILINE))
        points = dist.read_text("entry_points.txt") or ""
        name = fields.get("Name", "")
        if name.startswith("sley-") or any(group in points for group in _ENTRY_POINT_GROUPS):
            versions.setdefault(name, fields.get("Version", ""))  # an import finds the first one on sys.path
    return dict(sorted(versions.items()))


@dataclass(frozen=True)
class StartRecord:
    """The content of `start.json`, which records the last start of a run. time: in UTC, in ISO 8601. origins: the origin of
    each value of the plan (file and line, `--set #1` or default), by key, such as `run.steps`. machine: a description of the
    machine.
    """

    time: str
    origins: dict[str, str]
    machine: dict[str, Any]


def write_start_record(folder: Path, plan: Plan, *, include_gpus: bool) -> None:
    """Writes `start.json` into `folder`. plan: the resolved plan. include_gpus: whether to list the GPUs."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    origins = {format_path(path): plan.origin(path) for path, _ in iterate_values(plan.tables)}
    write_json(folder / START_FILE, vars(StartRecord(time, origins, describe_machine(include_gpus=include_gpus))))


def read_start_record(folder: Path) -> StartRecord | None:
    """Returns the start record in `folder`, or None if there is none. Raises OSError or, for invalid content, ValueError."""
    path = folder / START_FILE
    if not path.exists():
        return None
    try:
        return StartRecord(**json.loads(path.read_text("utf-8")))
    except TypeError as error:
        raise ValueError(f"`{path}` is not a valid start record") from error
