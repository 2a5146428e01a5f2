"""Launches: the scripts of examples/launch, the world of `--nodes` and `--per-node`, and the parts of a local launch: cores,
the link to the launcher, and the run folder. Stubs of SLURM's programs start ranks.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from started_program import Cli, Result

from sley_core.errors import PlanError
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from train_cli import environment
from train_cli.commands.run import count_devices
from train_cli.local_launch import make_rank_environment
from train_cli.run_folder import FolderInUseError, FolderLock, check_run_folder, is_folder_of_restarted_run, locked_run_folder

EXAMPLES = Path(__file__).parents[3] / "examples" / "launch"

NOTE = """#!/bin/bash
env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS)=' | sort > "$NOTES/$RANK"
echo "args=$*" >> "$NOTES/$RANK"
"""
"""A stub of train-cli, which writes its variables and arguments into a file."""

SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
for task in $(seq 0 $((TASKS - 1))); do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % PER_NODE)) SLURM_NTASKS=$TASKS SLURM_STEP_NUM_TASKS=$TASKS "$@" &
done
failed=0; for task in $(jobs -p); do wait "$task" || failed=1; done; exit $failed
"""
"""A stub of srun, which starts all tasks on this machine with SLURM's variables."""


@pytest.fixture
def stubs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the stubs first on PATH. They write into the folder `notes`."""
    programs = {"srun": SRUN, "train-cli": NOTE, "scontrol": "#!/bin/bash\necho localhost\n"}
    (folder / "bin").mkdir()
    (folder / "notes").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(folder / "notes"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return folder


def run_program(*command: str, **environ: str) -> Result:
    process = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False, env={**os.environ, **environ})
    return Result(process.returncode, process.stdout, process.stderr)


@pytest.mark.skipif(not EXAMPLES.exists(), reason="an sdist has no examples")
def test_slurm_gives_each_task_its_rank(stubs: Path) -> None:
    environ = {"SLURM_JOB_NODELIST": "a[0-1]", "SLURM_JOB_ID": "20007", "SLURM_CPUS_PER_TASK": "3"}
    environ |= {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "TASKS": "4", "PER_NODE": "2"}
    run_program("bash", str(EXAMPLES / "slurm.sbatch"), "plan.toml", "--resume", "auto", **environ).expect(0)
    for rank in range(4):
        notes = dict(line.partition("=")[::2] for line in (stubs / "notes" / str(rank)).read_text().splitlines())
        assert (notes["RANK"], notes["LOCAL_RANK"]) == (str(rank), str(rank % 2))
        assert (notes["WORLD_SIZE"], notes["LOCAL_WORLD_SIZE"], notes["OMP_NUM_THREADS"]) == ("4", "2", "3")
        assert (notes["MASTER_ADDR"], notes["MASTER_PORT"]) == ("localhost", "20007")
        assert notes["args"] == "run plan.toml --resume auto"


@pytest.mark.parametrize("command", ["check", "show"])
def test_nodes_and_per_node_set_the_world(cli: Cli, plan: Path, command: str) -> None:
    auto = ('parallel.dp="auto"', "batch.global_size=12", "batch.micro_size=1")
    assert cli(command, plan, "--nodes", 3, "--per-node", 2, changes=auto).code == 0
    assert "batch-does-not-divide" in cli(command, plan, "--world", 5, changes=auto).err or command == "show"
    cli(command, plan, "--nodes", 3, "--per-node", 2).expect(3, "must be pp x dp x sp = 1 x 2 x 1, but is 6")
    assert "pass both" in cli(command, plan, "--nodes", 3).err
    assert "remove one of them" in cli(command, plan, "--nodes", 3, "--per-node", 2, "--world", 6).err


# -- parts of a local launch -------------------------------------------------------------------------------------------


def test_ranks_share_the_cores_and_stay_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "read_cgroup_cores", lambda _: 0.5)
    assert environment.num_cores() == 1
    monkeypatch.setattr(environment, "num_cores", lambda: 8)
    assert [make_rank_environment(size, {})["OMP_NUM_THREADS"] for size in (2, 16)] == ["4", "1"]
    environ = make_rank_environment(2, {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0"})
    assert (environ["OMP_NUM_THREADS"], environ["GLOO_SOCKET_IFNAME"]) == ("3", "lo")


CGROUPS = {
    "the limit of a parent": ("0::/job/step\n", {"job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000"}, 2.5),
    "its own cgroup as the root": ("0::/docker/one\n", {"cpu.max": "150000 100000"}, 1.5),
    "no limit": ("0::/\n", {"cpu.max": "max 100000"}, math.inf),
    "no cgroup": (None, {}, math.inf),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_the_cpu_limit_of_a_cgroup_is_in_cores(tmp_path: Path, case: str) -> None:
    lines, files, cores = CGROUPS[case]
    for name, text in {"proc/self/cgroup": lines, **{f"sys/fs/cgroup/{key}": text for key, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / name).write_text(text, "utf-8")
    assert environment.read_cgroup_cores(tmp_path) == cores


LINK = (
    "import os; from train_cli import stopping; stopping.die_with_launcher(); print(stopping.has_launcher(), dict(os.environ))"
)


def test_a_rank_ends_with_its_launcher() -> None:
    program = (sys.executable, "-c", LINK)
    orphan = run_program(*program, SLEY_LAUNCHER="1")
    assert (orphan.code, orphan.out) == (1, "")
    linked = run_program(*program, SLEY_LAUNCHER=str(os.getpid()))
    assert linked.out.startswith("True "), linked.err
    assert "SLEY_LAUNCHER" not in linked.out
    assert run_program(*program).out.startswith("False ")


# -- the run folder ----------------------------------------------------------------------------------------------------


def take_step(plan: Plan, *, overwrite: bool = False) -> Path:
    """Makes a run folder like a run that takes a step."""
    with locked_run_folder(plan, overwrite=overwrite) as run_folder:
        (run_folder / "metrics.jsonl").write_text("{}\n", "utf-8")
    return run_folder


def assert_refused(plan: Plan, message: str, *, overwrite: bool = True) -> None:
    with pytest.raises(PlanError, match=message):
        check_run_folder(plan, overwrite=overwrite)
    with pytest.raises(PlanError, match=message), locked_run_folder(plan, overwrite=overwrite):
        pass


def test_a_run_folder_has_its_plan_and_is_replaced_only_with_overwrite(plan: Path, folder: Path) -> None:
    resolved = load_plan(plan)
    with locked_run_folder(resolved, overwrite=False) as run_folder:
        (run_folder / "metrics.jsonl").touch()
    assert not run_folder.exists(), "the run took no step"
    assert take_step(resolved) == run_folder == Path("runs", "small")
    assert load_plan(run_folder / "plan.toml") == resolved
    assert {path.name for path in run_folder.iterdir()} == {"metrics.jsonl", "plan.toml"}
    assert_refused(resolved, "--overwrite", overwrite=False)
    (run_folder / "old").mkdir()
    (run_folder / "link").symlink_to(plan)
    with locked_run_folder(resolved, overwrite=True):
        assert {path.name for path in run_folder.iterdir()} == {"plan.toml", ".lock"}
    assert plan.exists()
    # The folder of the plan has a `plan.toml`, but not a resolved one.
    assert_refused(load_plan(plan, [f'run.folder="{folder.parent}"', f'run.name="{folder.name}"']), "not a run folder")
    assert plan.exists()


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}], ids=["plain", "overwrite", "resume"])
def test_a_folder_with_only_records_of_ranks_is_used(plan: Path, folder: Path, options: dict[str, bool]) -> None:
    """Without a shared file system, ranks on other hosts than rank 0's leave such folders."""
    run_folder = folder / "runs" / "small"
    for name in ("work/rank-1.jsonl", ".lock", "faults/0/rank-1.json"):
        (run_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (run_folder / name).write_text("{}\n", "utf-8")
    with locked_run_folder(load_plan(plan), **{"overwrite": False, **options}):
        assert not (run_folder / "work").exists(), "of another run"
        assert (run_folder / "plan.toml").exists()


@pytest.mark.parametrize("name", ["work/thesis.tex", "work/rank-1.jsonl/notes", "work", ""])
def test_files_of_the_user_beside_records_are_never_replaced(plan: Path, folder: Path, name: str) -> None:
    path = folder / "runs" / "small" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine", "utf-8")
    assert_refused(load_plan(plan), "not a run folder")
    assert path.exists()


def test_a_folder_is_used_by_one_run_at_a_time(plan: Path, folder: Path) -> None:
    """So it is with `--overwrite`, and for a run that starts after the check."""
    resolved = load_plan(plan)
    with locked_run_folder(resolved, overwrite=False) as run_folder:
        for overwrite in (False, True):
            assert_refused(resolved, f"is used by an active run, process {os.getpid()}", overwrite=overwrite)
        with pytest.raises(FolderInUseError):
            FolderLock(run_folder)
        (run_folder / ".lock").write_text("")
        assert_refused(resolved, "is used by an active run\n")
        assert (run_folder / "plan.toml").exists()
        (run_folder / "metrics.jsonl").write_text("{}\n", "utf-8")
    lock = FolderLock(run_folder)  # a killed run leaves the file, which locks nothing
    os.close(lock._descriptor)
    assert (run_folder / ".lock").exists()
    take_step(resolved, overwrite=True)
    (run_folder / ".lock").symlink_to(folder / "elsewhere")
    assert_refused(resolved, "run-folder")
    assert not (folder / "elsewhere").exists()


def test_a_rank_that_torchrun_restarts_uses_its_folder(plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RUN_ID", "one"), ("RESTART_COUNT", "0"), ("MAX_RESTARTS", "1")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    run_folder = take_step(load_plan(plan))
    assert not is_folder_of_restarted_run(run_folder), "another run would delete it"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_folder_of_restarted_run(run_folder)
    take_step(load_plan(plan), overwrite=True)
    assert not (run_folder / ".lock").exists(), "this was the last attempt"
    assert not is_folder_of_restarted_run(run_folder)


def test_data_of_a_check_are_closed_once(own_model: Callable[[str], Path], cli: Callable[..., Any]) -> None:
    """Otherwise its workers would run beside those of the ranks."""
    path = own_model(
        """
        import torch
        from torch import nn
        from sley_core.data.dataset import DataInfo, Field

        calls = []

        class Data:
            info = DataInfo({name: Field("int64") for name in ("input", "labels")})
            def __init__(self): calls.append("opened")
            def __len__(self): return 8
            def __getitem__(self, index): raise AssertionError("read")
            def close(self): calls.append("closed")

        def layers():
            return [nn.Embedding(256, 256)]
        """,
        data='[data]\nfactory = "own:Data"\n',
    )
    assert cli("check", "--model", path).err.endswith("1 plan is valid\n")
    assert sys.modules["own"].calls == ["opened", "closed"]
    assert cli("check", "--model", path, "--set", "limits.collective_timeout_s=1e300").code == 3


def test_cuda_without_a_device_is_refused(plan: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cli("run", plan, "--set", 'run.device="cuda"').expect(1, "--set #1: error[no-device]")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    plans = (load_plan(plan, ['parallel.dp="auto"', f'run.device="{device}"']) for device in ("cpu", "cuda"))
    assert [count_devices(each) for each in plans] == [None, 3]
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    cli("run", plan, "--nproc", 2).expect(2, "error[nproc]")
    cli("verify", plan).expect(2, "error[verify-ranks]")
