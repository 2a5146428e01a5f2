"""Provides the pytest plugin `sley`: the fixtures, the marker `gpu`, and tracebacks that can print freed tensors.

pytest loads this module before it measures coverage, so the module imports only pytest. Fixtures and hooks import torch and
other modules when they are first used.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker `gpu`, and adds the root folder of the tests to `sys.path`."""
    description = "skips the test if there are fewer than `count` CUDA devices; one suffices with NCCL_MULTI_RANK_GPU_ENABLE=1"
    config.addinivalue_line("markers", f"gpu(count=1): {description}")
    root = str(config.rootpath)
    if root not in sys.path:  # ranks import test modules by names that start at the root (`--import-mode=importlib`)
        sys.path.append(root)
        config.add_cleanup(lambda: sys.path.remove(root))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked `gpu` if the machine has too few CUDA devices. One device is enough if NCCL lets ranks share it."""
    if marker := item.get_closest_marker("gpu"):
        import torch

        num_needed, num_devices = (*marker.args, *marker.kwargs.values(), 1)[0], torch.cuda.device_count()
        ranks_share = num_devices > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if num_devices < num_needed and not ranks_share:
            pytest.skip(f"the test needs {num_needed} CUDA devices, but the machine has {num_devices}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Prints tensors with freed memory as "freed" in the traceback of a failed test, since reading them crashes the process."""
    if call.excinfo is None or "torch" not in sys.modules:
        return (yield)
    from sley_testing.drawn_copies import patch_tensor_repr

    with patch_tensor_repr():
        return (yield)


@pytest.fixture
def ranks() -> Iterator[Any]:
    """Returns the class `Ranks`: `ranks(n, timeout_s=60, init=True)(function, *args, **kwargs)` returns a list of the results
    of n ranks. Each rank is a process on this machine that calls the module-level `function`. During the test, torch uses one
    thread in this process, as in the ranks, since a kernel's sums depend on the number of threads.
    """
    import torch

    from sley_testing.ranks import Ranks

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Ranks
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the text files that plans of `sley_testing.plans.small_plan` read."""
    from sley_testing.plans import write_texts

    folder = tmp_path_factory.mktemp("plan")
    write_texts(folder)
    return folder


@pytest.fixture
def install_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that installs plugins for this test and its ranks: `install_plugins(folder, mine="my_plugin")`. In
    this example, the distribution `sley-mine` has the plugin `mine` in the module `my_plugin` of `folder`. Further keywords add
    plugins to the same distribution.
    """

    def install(folder: Path, **plugins: str) -> None:
        name = next(iter(plugins))
        info = tmp_path / f"sley_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sley-{name}\nVersion: 1.0\nRequires-Dist: sley-core\n")
        lines = [f"{plugin} = {module}" for plugin, module in plugins.items()]
        (info / "entry_points.txt").write_text("\n".join(["[sley.plugins]", *lines, ""]))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.fixture
def port() -> Iterator[int]:
    """Returns a TCP port of 127.0.0.1 that the system assigns to no other program while the test runs. A bound socket reserves
    the port, but does not listen. A listener that sets SO_REUSEADDR, such as torch's TCPStore, can use the port.
    """
    import socket

    from sley_core.comm.world import reset_stores

    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        number: int = reserved.getsockname()[1]
        reset_stores()  # an earlier test may have used the same port
        yield number


@pytest.fixture
def no_children() -> Iterator[None]:
    """Fails a test if a child process of this process is still running one second after the test ends."""
    from sley_testing.processes import assert_none_left

    yield
    assert_none_left(within_s=1)
