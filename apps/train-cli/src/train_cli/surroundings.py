"""Sets the environment of local ranks: their launcher, threads and loopback.

Variables that the user has set are kept, except that a local run never communicates beyond loopback.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from train_cli.lifeline import LAUNCHER


def of_ranks(num_ranks: int, environ: Mapping[str, str], launcher: int) -> dict[str, str]:
    """Returns the variables that `num_ranks` ranks get beyond `environ`; `launcher` is the process that they die with."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    threads = max(1, num_cores() // num_ranks)
    defaults = {"OMP_NUM_THREADS": str(threads)}
    return {
        LAUNCHER: str(launcher),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **{name: value for name, value in defaults.items() if name not in environ},
    }


def num_cores() -> int:
    """Returns the cores that this process may use: in a container these can be fewer than the machine's, by its affinity or by
    the time that its cgroup may take.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return int(min(cores, max(1.0, cgroup_cores(Path("/")))))


def cgroup_cores(root: Path) -> float:
    """Returns how many cores' time the cgroups of this process may take, v1 or v2; infinity without a limit. root: of the file
    system, where tests have another one.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return math.inf
    limits = [math.inf]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        mounts = [controllers, "cpu"] if controllers else ["", "unified"]
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = PurePosixPath(path.lstrip("/"))
        # A limit further up counts too. Within a container its own cgroup may be what it sees as the root.
        groups = [root / "sys/fs/cgroup" / mount / group for mount in mounts for group in (own, *own.parents)]
        limits += [_share(group) for group in groups]
    return min(limits)


def _share(group: Path) -> float:
    """Returns how many cores' time one cgroup may take; infinity without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            quota, period = " ".join((group / name).read_text("utf-8") for name in names).split()
            return float(quota) / float(period) if float(quota) > 0 else math.inf  # "max", and -1 before: no limit
    return math.inf


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process within the block, and restores them; an agent starts its ranks with a copy."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
