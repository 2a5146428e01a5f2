"""The plugin in a pytest of its own: cheap to load, with its marker and options, and clean when it is interrupted."""

from __future__ import annotations

import multiprocessing.popen_forkserver
import os
import subprocess
import sys
import tempfile
import time
import uuid

import pytest
import torch

from sley_testing.processes import assert_none_left, processes_with
from sley_testing.ranks import Ranks

pytest_plugins = ["pytester"]

ALONE = ("-p", "no:hypothesispytest")
"""Without the plugin that would import hypothesis anew in each run, for its summary."""


KEPT = (torch, Ranks, multiprocessing.popen_forkserver)
"""pytester unloads what its runs import first; torch and the fork server are to be loaded once, before."""

HANGING = """
    import os, pathlib, time

    def hang(folder):
        pathlib.Path(folder, os.environ["RANK"]).touch()
        time.sleep(600)

    def test_hang(ranks, tmp_path):
        ranks(2, init=False)(hang, os.environ["FOLDER"])
"""


def test_loading_the_plugin_loads_pytest_and_nothing_heavy():
    show = "import sys, sley_testing.plugin; print(*sorted(m for m in sys.modules if m.startswith('sley')))"
    heavy = "print([m for m in ('torch', 'numpy', 'pydantic', 'multiprocessing') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", f"{show}; {heavy}"], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["sley_testing sley_testing.plugin", "[]"]


def test_a_test_that_needs_more_devices_than_there_are_is_skipped(pytester, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu(1000)
        def test_on_a_thousand_gpus(): ...

        @pytest.mark.gpu(0)
        def test_on_none(): ...
        """
    )
    result = pytester.runpytest(*ALONE, "-rs", "--strict-markers")
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(["*needs 1000 CUDA devices, but the machine has *"])


def test_a_process_left_behind_fails_the_test_that_asked(pytester):
    pytester.makepyfile(
        """
        import subprocess, sys, pytest

        @pytest.fixture
        def child():
            started = []
            yield started
            for process in started:
                process.kill()
                process.wait()

        def test_leaves_one(child, no_children):
            child.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        """
    )
    result = pytester.runpytest(*ALONE)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*1 processes are left after 1 s*"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_is_left_when_pytest_is_killed(pytester):
    mark, folder = uuid.uuid4().hex, pytester.mkdir("ranks")
    pytester.makepyfile(HANGING)
    with tempfile.TemporaryDirectory() as temporary:  # what is killed cannot tidy up
        environ = {**os.environ, "SLEY_TEST_MARK": mark, "FOLDER": str(folder), "TMPDIR": temporary}
        command = [sys.executable, "-m", "pytest", *ALONE]
        killed = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 50
            while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(processes_with("SLEY_TEST_MARK", mark)) >= 4, "pytest, the fork server and two ranks"
        finally:
            killed.kill()
            killed.wait()
        assert_none_left(lambda: processes_with("SLEY_TEST_MARK", mark), within_s=30)
