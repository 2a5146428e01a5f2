"""Tests `ranks`: the order of results, reports of failures and hangs, and the fixtures of the pytest plugin."""

import multiprocessing.popen_forkserver
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sley_testing.processes import assert_none_left, processes_with
from sley_testing.ranks import RankError, Ranks, RankTimeoutError


@dataclass(frozen=True)
class RankSum:
    """Holds a result. No rank can import this module by its name."""

    rank: int
    total: float


def sum_of_ranks(scale, *, plus):
    total = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(total)
    return RankSum(dist.get_rank(), total.item() + plus)


def test_results_are_in_rank_order(ranks):
    assert ranks(3)(sum_of_ranks, 10, plus=1) == [RankSum(0, 31.0), RankSum(1, 31.0), RankSum(2, 31.0)]


def rank_environment():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLEY_STORE", "SLEY_TEST_VALUE")
    return ({name: os.environ.get(name) for name in names}, str(Path.cwd()), torch.get_num_threads(), dist.is_initialized())


def test_rank_has_environment_and_folder_of_the_test(ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("SLEY_TEST_VALUE", "from the test")
    monkeypatch.chdir(tmp_path)
    first, second = ranks(2, init=False)(rank_environment)
    environ, folder, num_threads, is_initialized = second
    assert environ.pop("SLEY_STORE") == first[0]["SLEY_STORE"]
    assert environ == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "SLEY_TEST_VALUE": "from the test"}
    assert (folder, num_threads, is_initialized) == (str(tmp_path), 1, False)


def fail_on_rank_1():
    expected = 3
    if dist.get_rank() == 1:
        assert expected == 4
    dist.barrier()


def test_first_failure_is_raised_with_traceback_and_locals(ranks):
    with pytest.raises(AssertionError) as caught:
        ranks(2)(fail_on_rank_1)
    first, second = caught.value.__notes__
    assert first.startswith("rank 1 of 2 failed first")
    assert "in fail_on_rank_1" in first
    assert "assert expected == 4" in first
    assert "expected = 3" in first
    assert "sley_testing/ranks.py" not in first
    assert second.startswith("rank 0: ")


def exit_on_rank_0(method):
    if dist.get_rank() == 0:
        if method == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        elif method == "exit":
            os._exit(3)
        sys.exit(4)
    dist.barrier()


@pytest.mark.parametrize(
    ("method", "message"), [("signal", "died of SIGKILL"), ("exit", "exit code 3"), ("sys.exit", "SystemExit: 4")]
)
def test_rank_that_exits_is_reported_first(ranks, method, message):
    with pytest.raises(RankError, match=f"rank 0 of 2: .*{message}") as caught:
        ranks(2)(exit_on_rank_0, method)
    assert caught.value.__notes__[1].startswith("rank 1: ")


def warn():
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_warning_filters_of_the_test_apply(ranks):
    with pytest.raises(DeprecationWarning, match="old"):
        ranks(1)(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ranks(1)(warn)


def fail_in_a_thread():
    thread = threading.Thread(target=int, args=("x",))
    thread.start()
    thread.join()


class FailsInDel:
    def __del__(self):
        raise ValueError("in __del__")


def fail_in_del():
    FailsInDel()


@pytest.mark.parametrize(
    ("function", "category", "message"),
    [
        (fail_in_a_thread, pytest.PytestUnhandledThreadExceptionWarning, "invalid literal for int"),
        (fail_in_del, pytest.PytestUnraisableExceptionWarning, "ValueError: in __del__"),
    ],
)
def test_background_failure_is_raised(ranks, function, category, message):
    with pytest.raises(category, match=message):
        ranks(1)(function)


def hang_on_rank_1():
    print("about to hang" if dist.get_rank() == 1 else "about to return")
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), src=0)


def test_hang_is_reported_with_stacks(ranks, capsys):
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"1 of 2 ranks did not finish within 0\.5 s") as caught:
        ranks(2, timeout_s=0.5)(hang_on_rank_1)
    assert time.monotonic() - start < 15
    text = str(caught.value)
    assert "rank 0 had finished" in text
    assert "in hang_on_rank_1" in text
    assert "in recv" in text
    assert "sley_testing/ranks.py" not in text
    assert text.count("most recent call first") == 1
    assert "[rank 1] about to hang" in capsys.readouterr().out


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt."""


def test_interrupted_test_leaves_no_process(ranks, no_children):
    def interrupt(number, frame):
        raise Interrupted

    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Interrupted):
            ranks(2)(hang_on_rank_1)
        assert_none_left(within_s=0)
    finally:
        signal.signal(signal.SIGALRM, handler)


def fail_on_rank_0():
    if dist.get_rank() == 0:
        raise ValueError("cause")
    time.sleep(60)


def test_remaining_ranks_are_killed_after_grace_period(ranks, monkeypatch):
    monkeypatch.setattr("sley_testing.ranks.GRACE_S", 0.3)
    start = time.monotonic()
    with pytest.raises(ValueError, match="cause") as caught:
        ranks(2)(fail_on_rank_0)
    assert 0.3 <= time.monotonic() - start < 30
    assert "rank 1: still running" in caught.value.__notes__[1]


def test_lambda_is_refused(ranks):
    with pytest.raises(TypeError, match="use a function at module level"):
        ranks(1)(lambda: None)


def count_calls(folder, word):
    with (folder / "calls").open("a") as calls:
        calls.write("x")
    return [word, len((folder / "calls").read_text())]


def test_once_caches_equal_calls_and_copies_results(ranks, tmp_path, monkeypatch):
    (first,), (second,) = (ranks(1).once(count_calls, tmp_path, "a") for _ in range(2))
    assert first == second == ["a", 1]
    assert first is not second
    assert ranks(1).once(count_calls, tmp_path, "b") == [["b", 2]]
    monkeypatch.setenv("SLEY_TEST_VALUE", "other")
    assert ranks(1).once(count_calls, tmp_path, "a") == [["a", 3]]
    assert ranks(1)(count_calls, tmp_path, "a") == [["a", 4]]


# -- the plugin in an inner pytest --------------------------------------------------------------------------------------


pytest_plugins = ["pytester"]

INNER_OPTIONS = ("-p", "no:hypothesispytest")
"""Disables the plugin that would import hypothesis in each run."""


IMPORTED_BEFORE = (torch, Ranks, multiprocessing.popen_forkserver)
"""Modules that are imported before the inner pytest, which unloads all modules that it imports."""

HANGING = """
    import os, pathlib, time
    from sley_testing.processes import ForkedProgram

    def hang(folder):
        pathlib.Path(folder, os.environ["RANK"]).touch()
        time.sleep(600)

    def test_hang(ranks, tmp_path):
        (tmp_path / "program.py").write_text("import time; time.sleep(600)")
        ForkedProgram("program", [], cwd=tmp_path, env=dict(os.environ))
        ranks(2, init=False)(hang, os.environ["FOLDER"])
"""


def test_plugin_imports_only_pytest():
    show = "import sys, sley_testing.plugin; print(*sorted(m for m in sys.modules if m.startswith('sley')))"
    heavy = "print([m for m in ('torch', 'numpy', 'pydantic', 'multiprocessing') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", f"{show}; {heavy}"], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["sley_testing sley_testing.plugin", "[]"]


def test_test_with_too_many_devices_is_skipped(pytester, monkeypatch):
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
    result = pytester.runpytest(*INNER_OPTIONS, "-rs", "--strict-markers")
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(["*needs 1000 CUDA devices, but the machine has *"])


def test_remaining_process_fails_no_children(pytester):
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
    result = pytester.runpytest(*INNER_OPTIONS)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*1 processes are left after 1 s*"])


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_pytest_leaves_no_process(pytester):
    mark, folder = uuid.uuid4().hex, pytester.mkdir("ranks")
    pytester.makepyfile(HANGING)
    with tempfile.TemporaryDirectory() as temporary:  # a killed process removes no files
        environ = {**os.environ, "SLEY_TEST_MARK": mark, "FOLDER": str(folder), "TMPDIR": temporary}
        command = [sys.executable, "-m", "pytest", *INNER_OPTIONS]
        killed = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 50
            while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(processes_with("SLEY_TEST_MARK", mark)) >= 5, "pytest, the fork server, a program and two ranks"
        finally:
            killed.kill()
            killed.wait()
        assert_none_left(lambda: processes_with("SLEY_TEST_MARK", mark), within_s=30)
