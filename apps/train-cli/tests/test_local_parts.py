"""The parts of a local launch: environment, rendezvous, the tie to the launcher; and the run folder."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.utils.store import barrier

from sley_core.comm.startup import STORE
from sley_core.errors import PlanError
from sley_core.plan.load import load_plan
from train_cli import environment
from train_cli.local_launch import FileRendezvous, _scratch_folder, rank_variables
from train_cli.run_folder import FolderInUseError, FolderLock, check_run_folder, is_restart, lock, locked_run_folder


def test_ranks_share_the_cores_and_stay_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_cores", lambda: 8)
    assert [rank_variables(size, {})["OMP_NUM_THREADS"] for size in (2, 16)] == ["4", "1"]
    added = rank_variables(2, {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0"})
    assert "OMP_NUM_THREADS" not in added, "what the user set stays"
    assert added["GLOO_SOCKET_IFNAME"].startswith("lo")


CGROUPS = {
    "v2": ("0::/job/step\n", {"job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000"}, 2.5),
    "v2, as a container sees it": ("0::/docker/one\n", {"cpu.max": "150000 100000"}, 1.5),
    "v1": (
        "4:memory:/x\n3:cpu,cpuacct:/job\n",
        {"cpu,cpuacct/job/cpu.cfs_quota_us": "400000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
        4.0,
    ),
    "v1, mounted as cpu": ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    "v1 without a limit": ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    "v1 and v2": ("3:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "unified/cpu.max": "max 100000"}, math.inf),
    "none": ("", {}, math.inf),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_the_time_that_a_cgroup_may_take_is_counted_in_cores(tmp_path: Path, kind: str) -> None:
    lines, files, cores = CGROUPS[kind]
    for name, text in {"proc/self/cgroup": lines, **{f"sys/fs/cgroup/{key}": text for key, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    assert environment.cgroup_cores(tmp_path) == cores


def test_a_share_of_a_core_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cgroup_cores", lambda _: 0.5)
    assert environment.num_cores() == 1


def test_the_agent_waits_for_no_file_of_a_folder_that_was_tidied_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its ranks have ended, which may be days after the folder was made."""
    monkeypatch.setenv(STORE, "")
    rendezvous = FileRendezvous(tmp_path / "scratch", "local")
    (tmp_path / "scratch").mkdir()
    store, first = rendezvous.next_rendezvous().store, os.environ[STORE]
    rendezvous.next_rendezvous()
    assert os.environ[STORE] != first, "every attempt has a store of its own"
    shutil.rmtree(tmp_path / "scratch")
    barrier(store, 1, "ended", barrier_timeout=1)


def program(body: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", body], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False
    )


TIED = (
    "import os; from train_cli import stopping; stopping.die_with_launcher(); print(stopping.has_launcher(), dict(os.environ))"
)


def test_a_rank_ends_with_its_launcher_and_does_not_pass_it_on() -> None:
    gone = program(TIED, SLEY_LAUNCHER="1")
    assert (gone.returncode, gone.stdout) == (1, "")
    tied = program(TIED, SLEY_LAUNCHER=str(os.getpid()))
    assert tied.stdout.startswith("True "), tied.stderr
    assert "SLEY_LAUNCHER" not in tied.stdout
    assert program(TIED).stdout.startswith("False ")


# -- the run folder ----------------------------------------------------------------------------------------------------


def test_a_run_folder_is_made_with_its_plan(plan: Path, folder: Path) -> None:
    with locked_run_folder(load_plan(plan), overwrite=False) as made:
        assert made == Path("runs", "small")
        assert load_plan(made / "plan.toml") == load_plan(plan)
        (made / "metrics.jsonl").write_text("{}\n", "utf-8")
    assert {path.name for path in made.iterdir()} == {"metrics.jsonl", "plan.toml"}


def test_overwrite_replaces_the_whole_run(plan: Path, folder: Path) -> None:
    with locked_run_folder(load_plan(plan), overwrite=False) as made:
        (made / "metrics.jsonl").write_text("{}\n", "utf-8")
    with pytest.raises(PlanError, match="--overwrite"), locked_run_folder(load_plan(plan), overwrite=False):
        pass
    (made / "old").mkdir()
    (made / "link").symlink_to(plan)
    with locked_run_folder(load_plan(plan), overwrite=True):
        assert {path.name for path in made.iterdir()} == {"plan.toml", ".lock"}
    assert plan.exists()


def test_a_folder_of_the_users_is_never_replaced(plan: Path, folder: Path) -> None:
    """A plan's own folder is the nasty case: it holds a plan.toml, which is not a resolved one."""
    here = load_plan(plan, [f'run.folder="{folder.parent}"', f'run.name="{folder.name}"'])
    with pytest.raises(PlanError, match="not a run folder"), locked_run_folder(here, overwrite=True):
        pass
    assert plan.exists()


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}], ids=["plain", "overwrite", "resume"])
@pytest.mark.parametrize(
    "records",
    [(), ("work/rank-1.jsonl",), ("work/rank-1.jsonl", ".lock", "faults/0/rank-1.json")],
    ids=["none", "work", "faults"],
)
def test_a_folder_in_which_ranks_of_another_host_have_left_records_is_as_good_as_none(
    plan: Path, folder: Path, how: dict[str, bool], records: tuple[str, ...]
) -> None:
    """So is an empty one. Without a shared folder rank 0 writes plan and rows on its own host, and others write what they work
    at on theirs.
    """
    made = folder / "runs" / "small"
    made.mkdir(parents=True)
    for name in records:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("{}\n", "utf-8")
    check_run_folder(load_plan(plan), **{"overwrite": False, **how})
    with locked_run_folder(load_plan(plan), **{"overwrite": False, **how}):
        assert not (made / "work").exists(), "of another run"
        assert (made / "plan.toml").exists()


@pytest.mark.parametrize("name", ["work/thesis.tex", "work/rank-1.jsonl/notes", "work"])
def test_a_folder_of_work_of_the_users_is_never_replaced(plan: Path, folder: Path, name: str) -> None:
    path = folder / "runs" / "small" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine", "utf-8")
    with pytest.raises(PlanError, match="not a run folder"):
        check_run_folder(load_plan(plan), overwrite=True)
    with pytest.raises(PlanError, match="not a run folder"), locked_run_folder(load_plan(plan), overwrite=True):
        pass
    assert path.exists()


def test_a_run_that_took_no_step_leaves_no_folder(plan: Path, folder: Path) -> None:
    with locked_run_folder(load_plan(plan), overwrite=False) as made:
        (made / "metrics.jsonl").touch()
    assert not made.exists()


def test_a_folder_is_of_one_run_at_a_time(plan: Path, folder: Path) -> None:
    """Also with --overwrite, and also where the other starts between the check and the making."""
    resolved = load_plan(plan)
    with locked_run_folder(resolved, overwrite=False) as made:
        for overwrite in (False, True):
            with pytest.raises(PlanError, match=f"is used by an active run, process {os.getpid()}"):
                check_run_folder(resolved, overwrite=overwrite)
        with pytest.raises(FolderInUseError):
            FolderLock(made)
        assert (made / "plan.toml").exists()
        (made / "metrics.jsonl").write_text("{}\n", "utf-8")
    lock = FolderLock(made)  # a run that is killed leaves the file, and nobody is kept out by it
    os.close(lock._file)
    assert (made / ".lock").exists()
    with locked_run_folder(resolved, overwrite=True):
        pass


def test_a_lock_that_is_a_link_is_not_followed(plan: Path, folder: Path) -> None:
    (folder / "runs" / "small").mkdir(parents=True)
    (folder / "runs" / "small" / ".lock").symlink_to(folder / "elsewhere")
    with pytest.raises(PlanError, match="run-folder"), locked_run_folder(load_plan(plan), overwrite=True):
        pass
    assert not (folder / "elsewhere").exists()


def test_a_rank_that_torchrun_starts_again_has_its_folder(plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RUN_ID", "one"), ("RESTART_COUNT", "0"), ("MAX_RESTARTS", "1")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    with locked_run_folder(load_plan(plan), overwrite=False) as made:
        (made / "metrics.jsonl").write_text("{}\n", "utf-8")
    assert not is_restart(made), "another run would take it away"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_restart(made)
    with locked_run_folder(load_plan(plan), overwrite=True):
        (made / "metrics.jsonl").write_text("{}\n", "utf-8")
    assert not (made / ".lock").exists(), "the last attempt"
    assert not is_restart(made)


def test_data_that_only_a_check_opened_is_closed_once(own_model: Callable[[str], Path], cli: Callable[..., Any]) -> None:
    """Its workers would stay beside those of the ranks."""
    path = own_model(
        """
        import torch
        from torch import nn
        from sley_core.data.dataset import DataInfo, Field

        said = []

        class Data:
            info = DataInfo({name: Field("int64") for name in ("input", "labels")})
            def __init__(self): said.append("opened")
            def __len__(self): return 8
            def __getitem__(self, index): raise AssertionError("read")
            def close(self): said.append("closed")

        def layers():
            return [nn.Embedding(256, 256)]
        """,
        data='[data]\nfactory = "own:Data"\n',
    )
    assert cli("check", "--model", path).err.endswith("1 plan is fine\n")
    assert sys.modules["own"].said == ["opened", "closed"]
    assert cli("check", "--model", path, "--set", "limits.collective_timeout_s=1e300").code == 3


# -- before a process starts -------------------------------------------------------------------------------------------


def test_cuda_without_a_device(plan: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = cli("run", plan, "--set", 'run.device="cuda"')
    assert result.code == 1
    assert "--set #1: error[no-device]" in result.err


def test_the_folder_of_a_launch_is_locked_while_its_ranks_run() -> None:
    """What tidies the folder of temporary files leaves a locked one alone (tmpfiles.d(5))."""
    with _scratch_folder() as path:
        other = os.open(path, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                lock(other)
        finally:
            os.close(other)
    assert not path.exists()
