"""SLURM on this machine alone: its controller and one node of two cores, with a configuration of their own."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

LIBRARIES = "usr/lib/x86_64-linux-gnu"
START_S = 40.0

_CONFIGURATION = """\
ClusterName=sley
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
KillWait=20
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmDaemons(AbstractContextManager["SlurmDaemons"]):
    """root: where `.ci/get_slurm` has unpacked SLURM. environ: for its commands. Raises OSError if it does not come up."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        plugins = root / LIBRARIES / "slurm-wlm"
        self.environ = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{plugins}:{root / LIBRARIES}",
            "PATH": f"{root / 'usr/bin'}:{os.environ['PATH']}",
        }
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        given = {"host": platform.node().partition(".")[0], "user": os.environ.get("USER", "root"), "plugins": plugins}
        text = _CONFIGURATION.format(folder=folder, ports=_free_ports(), **given)
        (folder / "slurm.conf").write_text(text, "utf-8")
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmDaemons:
        self._start("slurmctld-wlm", "-i")
        self._start("slurmd-wlm", "-d", str(self._root / "usr/sbin/slurmstepd-wlm"))
        until = time.monotonic() + START_S
        while "idle" not in self.call("sinfo", "--noheader", check=False):
            if time.monotonic() > until:
                logs = "\n".join(path.read_text("utf-8") for path in sorted(self._folder.glob("*.log")))
                self.__exit__(None, None, None)
                raise OSError(f"SLURM does not come up: {logs}")
            time.sleep(0.2)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._daemons:
            self.call("scancel", "--user", str(os.getuid()), "--signal", "KILL", "--full", check=False)
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(30)

    def call(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Returns what one of SLURM's commands writes, errors too."""
        done = subprocess.run(
            command,
            env=self.environ,
            cwd=cwd,
            text=True,
            timeout=120,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0 or not check, done.stdout
        return done.stdout

    def _start(self, name: str, *options: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [str(self._root / "usr/sbin" / name), "-D", *options]
            self._daemons.append(subprocess.Popen(command, env=self.environ, stdout=log, stderr=log))


def slurm_root() -> Path | None:
    """Returns where SLURM was unpacked, by the variable SLEY_SLURM; None if it is not there."""
    given = os.environ.get("SLEY_SLURM")
    return Path(given) if given and shutil.which("slurmctld-wlm", path=f"{given}/usr/sbin") else None


def _free_ports() -> list[int]:
    sockets = [socket.socket() for _ in range(2)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found
