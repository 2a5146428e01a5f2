"""Processes of ranks run several calls, and none that a call has changed runs another one."""

from __future__ import annotations

import builtins
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sley_core.actions import simulate
from sley_testing import plain
from sley_testing import ranks as kit
from sley_testing.processes import descendants
from sley_testing.ranks import end_idle, idle_processes

written = []
"""What calls of this module's functions have left in it."""


@pytest.fixture(autouse=True)
def no_teams():
    """Each test begins with none, whatever ran before it."""
    end_idle()


def process_and_group():
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), total.item()


def test_the_next_call_runs_in_the_same_processes_in_the_same_order(ranks):
    first = ranks(2)(process_and_group)
    assert ranks(2)(process_and_group) == first
    assert [rank for _, rank, _ in first] == [0, 1]
    assert idle_processes() == {process for process, *_ in first}
    assert not idle_processes() & {process.pid for process in descendants()}


def what_a_test_could_notice():
    written.append(1)
    seen = {
        "module": len(written),
        "drawn": torch.rand(1).item(),
        "folder": str(Path.cwd()),
        "hook": sys.excepthook is sys.__excepthook__,
        "environment": os.environ.get("SLEY_TEST_LEFT"),
        "path": "/nowhere" in sys.path,
    }
    os.environ["SLEY_TEST_LEFT"] = "here"
    sys.path.append("/nowhere")
    sys.excepthook = lambda *_: None
    torch.manual_seed(3)
    return os.getpid(), seen


def test_a_call_sees_nothing_of_the_one_before(ranks, monkeypatch, tmp_path):
    (first, seen), (_, also) = (ranks(1)(what_a_test_could_notice)[0] for _ in range(2))
    assert also == seen
    assert (seen["module"], seen["environment"], seen["path"]) == (1, None, False)
    monkeypatch.chdir(tmp_path)
    ((process, there),) = ranks(1)(what_a_test_could_notice)
    assert (process, there["folder"]) == (first, str(tmp_path))


def leave_a_patched_function():
    plain.as_model = None


def leave_a_patched_method():
    simulate.Costs.even = None


def leave_a_patch_in_torch():
    torch.nn.Module.forward = None


def leave_a_patched_builtin():
    builtins.breakpoint = None


def leave_a_default_dtype():
    torch.set_default_dtype(torch.float64)


def leave_no_gradients():
    torch.set_grad_enabled(False)


def leave_a_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def leave_a_file():
    os.open(__file__, os.O_RDONLY)


def leave_a_child():
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")


def leave_a_signal_handler():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave_an_element():
    from sley_testing.runs import _alone

    _alone["x"] = None


def leave_another_value():
    from sley_core.plan.kinds import BASES

    BASES[next(iter(BASES))] = None


def leave_much_memory():
    torch._left = torch.ones(80 * 2**20)


@pytest.mark.parametrize(
    ("leave", "word"),
    [
        (leave_a_patched_function, r"plain\.as_model is None"),
        (leave_a_patched_method, r"Costs\.even is None"),
        (leave_a_patch_in_torch, r"Module\.forward is None"),
        (leave_a_patched_builtin, r"builtins\.breakpoint is None"),
        (leave_a_default_dtype, r"default dtype is torch\.float64"),
        (leave_no_gradients, "grad mode is False"),
        (leave_a_thread, "threads is"),
        (leave_a_file, "open files is"),
        (leave_a_child, "children is True"),
        (leave_a_signal_handler, "SIGUSR1"),
        (leave_an_element, "_alone has other contents: 2, had 0"),
        (leave_another_value, "BASES has other contents"),
        (leave_much_memory, "memory"),
    ],
)
def test_processes_that_a_call_has_changed_run_no_other(ranks, monkeypatch, leave, word):
    told = []
    rest = kit.Team.rest

    def listen(team):
        told.extend(rest(team))
        return told

    monkeypatch.setattr(kit.Team, "rest", listen)
    ranks(1)(leave)
    assert any(re.search(word, one) for one in told), told
    assert not idle_processes()


def fail():
    raise ValueError("of this call")


def test_after_a_failure_there_are_new_processes(ranks):
    before = ranks(2)(process_and_group)
    with pytest.raises(ValueError, match="of this call"):
        ranks(2)(fail)
    assert not idle_processes()
    after = ranks(2)(process_and_group)
    assert not {process for process, *_ in before} & {process for process, *_ in after}


def test_what_is_asked_once_is_called_once_and_each_has_results_of_its_own(ranks, tmp_path, monkeypatch):
    (first,), (again,) = (ranks(1).once(call_number, tmp_path, "a") for _ in range(2))
    assert first == again == ["a", 1]
    assert first is not again
    assert ranks(1).once(call_number, tmp_path, "b") == [["b", 2]]
    monkeypatch.setenv("SLEY_TEST_VALUE", "other")
    assert ranks(1).once(call_number, tmp_path, "a") == [["a", 3]]
    assert ranks(1)(call_number, tmp_path, "a") == [["a", 4]]


def call_number(folder, word):
    with (folder / "calls").open("a") as calls:
        calls.write("x")
    return [word, len((folder / "calls").read_text())]
