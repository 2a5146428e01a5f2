"""Imports the modules that ranks need into the fork server, so that a rank starts in milliseconds.

This includes modules that torch imports late: the first optimizer of a process imports torch._dynamo, which takes 1 s. A failed
import is ignored here; the rank that needs the module then raises the error in its test.
"""

import contextlib
import ctypes
import gc
import pkgutil
import re
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import torch

import sley_core


def module_names() -> Iterator[str]:
    """Yields the names of modules that ranks may need: of pytest, hypothesis, torch, core and all installed plugins."""
    yield from (
        "pytest",
        "hypothesis",
        "torch.distributed",
        "torch._dynamo",
        "torch.profiler._cupti_monitor",
        "torch.utils.serialization.config",
        "packaging.requirements",
    )
    yield from _submodule_names(sley_core)
    for dist in distributions():
        if any(re.match(r"sley-core\b", requirement) for requirement in dist.requires or ()):
            for name in sorted({point.module.partition(".")[0] for point in dist.entry_points}):
                with contextlib.suppress(Exception):
                    yield from _submodule_names(import_module(name))


def _submodule_names(package: ModuleType) -> Iterator[str]:
    # `onerror` skips packages that cannot be imported.
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None)
    return (module.name for module in modules if not module.name.endswith("__main__"))


def assemble_once() -> None:
    """Assembles a small run, so that ranks inherit the search for plugins, and state that torch and pydantic create lazily. The
    run takes no step, since autograd does not work in a process that was forked after a backward.
    """
    from sley_core.comm.transport import installed_transports
    from sley_core.comm.world import World
    from sley_core.plan.load import plan_from_dict
    from sley_testing.plans import small_plan, write_texts
    from sley_trainer.assemble import assemble

    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=()):
        write_texts(Path(folder))
        plan = plan_from_dict(small_plan(run__keep_freed_memory=False), Path(folder))
        with World.alone("cpu") as world, assemble(plan, world):
            pass
    installed_transports()  # a world of one rank does not load them
    for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        optimizer([torch.zeros(1)])  # the first instance wraps the `step` of its class


_HUGE_PAGE = 2**21  # bytes
_MADV_COLLAPSE = 25  # an advice of madvise(2), which Linux knows since 6.1


def join_pages() -> None:
    """Moves the memory of this process into huge pages, so that a fork and the end of a fork take a quarter of the time: both
    go through the table of all pages. Systems that cannot do it ignore the advice.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        addresses, permissions, _, _, inode, *path = line.split()
        if permissions.startswith("rw") and inode == "0" and path in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
            if start < end:
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


gc.disable()  # imports free nothing, and garbage collection would take a quarter of their time
for _name in module_names():
    with contextlib.suppress(Exception):
        import_module(_name)
torch.set_num_threads(1)
with contextlib.suppress(Exception):
    assemble_once()
gc.enable()
gc.freeze()  # so that garbage collection in a rank does not copy shared pages
with contextlib.suppress(Exception):
    join_pages()
