"""Starts a rank under a launcher: checks the environment, meets the other ranks, and shows each failure once.

the environment ──> refused: tasks that know of no ranks, worlds smaller than what the batch system started
this rank's plan ──> rendezvous: all ranks have the same plan and versions, or none starts
a rank that cannot begin ──> tells the others, who end at once
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from sley_core.errors import RunError, UsageError
from train_cli import console
from train_cli.console import Settings
from train_cli.stopping import ELASTIC, has_launcher
from train_cli.surroundings import num_cores

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from train_cli.faults import Fault
    from train_cli.rendezvous import Rendezvous

PREFLIGHT = "preflight"
"""The code of a start that all ranks refuse together."""

_STARTERS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "task", "RANK=$SLURM_PROCID, LOCAL_RANK=$SLURM_LOCALID, WORLD_SIZE=$SLURM_NTASKS"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "process", "RANK=$OMPI_COMM_WORLD_RANK, ..., WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"),
    "PET_NNODES": ("the TrainJob", "pod", "nothing: its command must be `torchrun -m train_cli run PLAN`"),
}
"""Variables in which an engine says how many processes it has started: its name, what it calls one, what each of them needs."""

_TELLS_S = 30.0
"""Seconds for which a rank that cannot begin, and has said so, tries to tell rank 0, which may come later."""

_HEAD_START_S = 3.0
"""Seconds that another rank with the first one's error waits: a launcher ends all ranks when the first of them has ended."""


def refuse_lone_worlds(environ: Mapping[str, str]) -> None:
    """Raises UsageError "no-ranks" if an engine started several processes and this one knows of fewer ranks: each would be a
    run of its own, and only one of them has the run's folder.
    """
    if ("RANK" in environ) != ("WORLD_SIZE" in environ) and environ.get("WORLD_SIZE") != "1":
        there, missing = ("RANK", "WORLD_SIZE") if "RANK" in environ else ("WORLD_SIZE", "RANK")
        hint = "a launcher sets both, and LOCAL_RANK, MASTER_ADDR, MASTER_PORT; where there is none, unset it"
        raise UsageError("no-ranks", f"{there} is set, and {missing} is not", hint=hint)
    known = int(environ["WORLD_SIZE"]) if environ.get("WORLD_SIZE", "").isdecimal() else 0
    for variable, (engine, unit, needs) in _STARTERS.items():
        started = environ.get(variable, "1").partition(":")[0]
        if not started.isdecimal() or int(started) <= max(1, known):
            continue
        advice = f"tell it of {known} rank{'' if known == 1 else 's'}" if known else "tell this one which rank it is"
        raise UsageError(
            "no-ranks",
            f"{engine} has started {started} {unit}{'es' if unit.endswith('s') else 's'}, but no RANK and WORLD_SIZE {advice}",
            hint=f"`train-cli launch` prints what starts them; each {unit} needs {needs}, and MASTER_ADDR and MASTER_PORT; "
            f"where each is a run of its own, unset {variable}",
        )


class RankFaults(AbstractContextManager["RankFaults"]):
    """Shows an error of its block once per host or rank, writes the report for the launcher, and raises SystemExit instead.

    An error before `has_begun` is set occurs on all ranks alike, or only on this rank, before it joins the others. The first
    rank of each host shows it, and the other ranks receive it. settings: None in a local launch, whose launcher shows errors.
    """

    def __init__(self, rank: int, settings: Settings | None = None) -> None:
        self._rank = rank
        self._settings = settings
        self.has_begun = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        from train_cli.faults import Fault, write_report

        fault = Fault.of(error)
        shows = self._rank == 0 or os.environ.get("LOCAL_RANK") == "0"
        if self.has_begun:
            shows = shows or all(diagnostic.code != PREFLIGHT for diagnostic in fault.diagnostics)
            if self._rank:
                named = (replace(each, message=f"rank {self._rank}: {each.message}") for each in fault.diagnostics)
                fault = replace(fault, diagnostics=tuple(named))
        write_report(fault)
        if shows and self._settings is not None:
            console.show(fault, self._settings)
        if not self.has_begun:
            _tell_others(fault)
        if not shows and self._settings is not None:
            time.sleep(_HEAD_START_S)
        raise SystemExit(fault.exit_code) from error


def _meets() -> bool:
    """Returns whether this rank meets others over the network: not alone, and not started by a local launch, which has checked
    everything and names a store on this machine.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" not in os.environ or not size.isdecimal() or int(size) == 1 or has_launcher():
        return False
    from sley_core.comm.startup import STORE

    return STORE not in os.environ


def meet(plan: Plan) -> Rendezvous | None:
    """Checks that all ranks have the same plan and versions, and returns their rendezvous; None if this rank meets nobody.

    Raises RunError "preflight" on all ranks alike, or on this one if it finds no others.
    """
    if not _meets():
        return None
    import torch

    from sley_core.plan.write import digested
    from train_cli.rendezvous import Rendezvous

    rendezvous = Rendezvous.at(os.environ, timeout_s=plan.limits.start_timeout_s)
    facts = {"the plan": plan.digest, "torch": torch.__version__}
    if plan.run.device != "cpu":  # with other devices they would wait for one another in different backends
        facts["CUDA devices"] = "some" if torch.cuda.is_available() else "none"
    facts |= {f"plugin {name}": str(plugin) for name, plugin in plan.plugins.items()}
    rendezvous.agree(facts, {"the plan": digested(plan)})
    return rendezvous


def _tell_others(fault: Fault) -> None:
    """Tells the ranks that wait for this one why it does not begin."""
    if not _meets() or not fault.diagnostics:
        return
    from train_cli.rendezvous import Rendezvous

    first = fault.diagnostics[0]
    where = f"{first.place}: " if first.place else ""
    try:
        Rendezvous.at(os.environ, timeout_s=_TELLS_S).give_up(f"{where}{first.message}", first.hint)
    except (RunError, KeyError, ValueError):
        return  # its own error is what counts


def thread_note(environ: Mapping[str, str], *, is_cpu: bool) -> str:
    """Returns a note if torchrun left each rank one thread though there are several cores; "" if it did not, or on a GPU."""
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    if not is_cpu or ELASTIC not in environ or environ.get("OMP_NUM_THREADS") != "1" or not ranks.isdecimal():
        return ""
    share = num_cores() // max(1, int(ranks))
    if share <= 1 or has_launcher():
        return ""
    return f"torchrun has set OMP_NUM_THREADS=1: each rank computes on 1 of {share} cores; set OMP_NUM_THREADS={share}"
