"""Starts a rank under a launcher: checks the environment, joins the other ranks, and prints each failure once.

environment ──> refused if a process has no rank, or if WORLD_SIZE is smaller than the number of started processes
plan        ──> rendezvous: all ranks have the same plan and versions, or none starts
failure     ──> reported to the other ranks, which end at once
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from sley_core.errors import RunError, UsageError
from train_cli.console import Settings, print_fault
from train_cli.stopping import has_launcher

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from train_cli.faults import Fault
    from train_cli.rendezvous import Rendezvous

PREFLIGHT = "preflight"
"""The error code of ranks that cannot start together."""

_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "task", "RANK=$SLURM_PROCID, LOCAL_RANK=$SLURM_LOCALID, WORLD_SIZE=$SLURM_NTASKS"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "process", "RANK=$OMPI_COMM_WORLD_RANK, ..., WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"),
    "PET_NNODES": ("the TrainJob", "pod", "nothing: its command must be `torchrun -m train_cli run PLAN`"),
}
"""For each launcher, keyed by the environment variable in which it sets the number of processes: its name, its term for a
process, and the variables that a process needs.
"""

_NOTIFICATION_TIMEOUT_S = 30.0
"""Seconds for which a rank that cannot start tries to reach rank 0, which may start later."""

_EXIT_DELAY_S = 3.0
"""Seconds by which a rank delays its exit if another rank prints the error, since a launcher ends all ranks after the first
exit.
"""


def check_launcher_variables(environ: Mapping[str, str]) -> None:
    """Raises UsageError "no-ranks" if only one of RANK and WORLD_SIZE is set, or if a launcher has started more processes than
    WORLD_SIZE. In the second case, each process would be a separate run, and only one of them could use the run folder.
    """
    if ("RANK" in environ) != ("WORLD_SIZE" in environ) and environ.get("WORLD_SIZE") != "1":
        name, missing_name = ("RANK", "WORLD_SIZE") if "RANK" in environ else ("WORLD_SIZE", "RANK")
        hint = "set both, and LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as launchers do; without a launcher, unset both"
        raise UsageError("no-ranks", f"{name} is set, but {missing_name} is not", hint=hint)
    world = int(environ["WORLD_SIZE"]) if environ.get("WORLD_SIZE", "").isdecimal() else 0
    for variable, (launcher, process, required_variables) in _LAUNCHERS.items():
        started = environ.get(variable, "1").partition(":")[0]
        if not started.isdecimal() or int(started) <= max(1, world):
            continue
        problem = f"WORLD_SIZE is {world}" if world else "RANK and WORLD_SIZE are not set"
        raise UsageError(
            "no-ranks",
            f"{launcher} has started {started} {process}{'es' if process.endswith('s') else 's'}, but {problem}",
            hint=f"use a script like those in examples/launch; each {process} needs {required_variables}, and MASTER_ADDR and "
            f"MASTER_PORT; if each is a separate run, unset {variable}",
        )


class RankErrorReporter(AbstractContextManager["RankErrorReporter"]):
    """A context manager that turns an error of its block into SystemExit. It prints the error and writes a report for the
    launcher.

    Until `is_training` is set, an error occurs on all ranks, or keeps this rank from joining the others. Only the first rank of
    each host prints such an error, and this rank sends it to the others. settings: None in a local launch, whose launcher
    prints errors.
    """

    def __init__(self, rank: int, settings: Settings | None = None) -> None:
        self._rank = rank
        self._settings = settings
        self.is_training = False

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        from train_cli.faults import Fault, write_report

        fault = Fault.from_error(error)
        prints = self._rank == 0 or os.environ.get("LOCAL_RANK") == "0"
        if self.is_training:
            prints = prints or all(diagnostic.code != PREFLIGHT for diagnostic in fault.diagnostics)
            if self._rank:
                fault = fault.with_label(f"rank {self._rank}")
        write_report(fault)
        if prints and self._settings is not None:
            print_fault(fault, self._settings)
        if not self.is_training:
            _notify_others(fault)
        if not prints and self._settings is not None:
            time.sleep(_EXIT_DELAY_S)
        raise SystemExit(fault.exit_code) from error


def _has_remote_peers() -> bool:
    """Returns whether this rank meets other ranks over the network. False for a single rank, and in a local launch, whose
    launcher has checked the plan and whose store is on this machine.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" not in os.environ or not size.isdecimal() or int(size) == 1 or has_launcher():
        return False
    from sley_core.comm.world import STORE_VARIABLE

    return STORE_VARIABLE not in os.environ


def open_rendezvous(plan: Plan) -> Rendezvous | None:
    """Checks that all ranks have the same plan and versions, and returns their rendezvous. Returns None without remote peers.

    Raises RunError "preflight" on all ranks, or only on this rank if it does not find the others.
    """
    if not _has_remote_peers():
        return None
    import torch

    from sley_core.plan.plan import format_values
    from train_cli.rendezvous import Rendezvous

    rendezvous = Rendezvous.join(os.environ, timeout_s=plan.limits.start_timeout_s)
    info = {"the plan": plan.digest, "torch": torch.__version__}
    if plan.run.device != "cpu":  # ranks with different devices would wait for each other in different backends
        info["CUDA devices"] = "some" if torch.cuda.is_available() else "none"
    info |= {f"plugin {name}": str(plugin) for name, plugin in plan.plugins.items()}
    rendezvous.agree(info, {"the plan": format_values(plan)})
    return rendezvous


def _notify_others(fault: Fault) -> None:
    """Sends the reason why this rank cannot start to the ranks that wait for it."""
    if not _has_remote_peers() or not fault.diagnostics:
        return
    from train_cli.rendezvous import Rendezvous

    with suppress(RunError, KeyError, ValueError):  # this rank's own error matters more
        Rendezvous.join(os.environ, timeout_s=_NOTIFICATION_TIMEOUT_S).report_failure(fault.diagnostics[0])
