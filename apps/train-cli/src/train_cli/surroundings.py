"""Sets the environment of local ranks: their launcher, threads and loopback.

Variables that the user has set are kept, except that a local run never communicates beyond loopback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
    """Returns the cores that this process may use; in a container these can be fewer than the machine's."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


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
