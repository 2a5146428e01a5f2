"""Checks a rank before it waits for others: that its launcher started it rightly, and that all ranks start the same run.

the environment ──> refused: tasks that know of no ranks, worlds smaller than what the batch system started
this rank's plan ──> meeting (`train_cli.start.meeting`): all ranks have the same plan and versions, or none starts
a rank that cannot begin ──> tells the others, who end at once
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sley_core.errors import RunError, UsageError
from train_cli import lifeline
from train_cli.surroundings import num_cores

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from train_cli.faults import Fault
    from train_cli.start.meeting import Meeting

PREFLIGHT = "preflight"
"""The code of a start that ranks have refused together, which all of them raise."""

_STARTERS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "task", "RANK=$SLURM_PROCID, LOCAL_RANK=$SLURM_LOCALID, WORLD_SIZE=$SLURM_NTASKS"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "process", "RANK=$OMPI_COMM_WORLD_RANK, ..., WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"),
    "PET_NNODES": ("the TrainJob", "pod", "nothing: its command must be `torchrun -m train_cli run PLAN`"),
}
"""Variables in which an engine says how many processes it has started: its name, what it calls one, what each of them needs."""

_TELLS_S = 30.0
"""How long a rank that cannot begin, and has said so, tries to tell rank 0, which may be slower to come."""


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
        told = f"tell it of {known} rank{'' if known == 1 else 's'}" if known else "tell this one which rank it is"
        raise UsageError(
            "no-ranks",
            f"{engine} has started {started} {unit}{'es' if unit.endswith('s') else 's'}, but no RANK and WORLD_SIZE {told}",
            hint=f"`train-cli launch` prints what starts them; each {unit} needs {needs}, and MASTER_ADDR and MASTER_PORT; "
            f"where each is a run of its own, unset {variable}",
        )


def is_met() -> bool:
    """Returns whether this rank meets others over the network: not alone, and not started by a launcher of ours, which has
    checked everything and names a store on this machine.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" not in os.environ or not size.isdecimal() or int(size) == 1 or lifeline.is_held():
        return False
    from sley_core.comm.startup import STORE

    return STORE not in os.environ


def meet(plan: Plan) -> Meeting | None:
    """Brings this rank to a meeting of all ranks, checks that all have the same plan and versions, and returns the meeting;
    None if this rank meets nobody.

    Raises RunError "preflight" on all ranks alike, or on this one if it finds no others.
    """
    if not is_met():
        return None
    import torch

    from sley_core.plan.write import digested
    from train_cli.start.meeting import Meeting

    meeting = Meeting.at(os.environ, timeout_s=plan.limits.start_timeout_s)
    facts = {"the plan": plan.digest, "torch": torch.__version__}
    if plan.run.device != "cpu":  # with other devices they would wait for one another in different backends
        facts["CUDA devices"] = "some" if torch.cuda.is_available() else "none"
    facts |= {f"plugin {name}": str(plugin) for name, plugin in plan.plugins.items()}
    meeting.agree(facts, {"the plan": digested(plan)})
    return meeting


def tell(fault: Fault) -> None:
    """Sends the ranks that wait for this one the reason why it does not begin; returns when they have it, or after some
    seconds.
    """
    if not is_met() or not fault.diagnostics:
        return
    from train_cli.start.meeting import Meeting

    first = fault.diagnostics[0]
    where = f"{first.place}: " if first.place else ""
    try:
        Meeting.at(os.environ, timeout_s=_TELLS_S).give_up(f"{where}{first.message}", first.hint)
    except (RunError, KeyError, ValueError):
        return  # its own error is what counts


def thread_note(environ: Mapping[str, str], *, is_cpu: bool) -> str:
    """Returns a note if the launcher left each rank one thread though there are several cores; "" if it did not, or on a
    GPU.
    """
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    if not is_cpu or lifeline.is_held() or environ.get("OMP_NUM_THREADS") != "1" or not ranks.isdecimal():
        return ""
    share = num_cores() // max(1, int(ranks))
    if share <= 1 or lifeline.ELASTIC not in environ:
        return ""
    return f"torchrun has set OMP_NUM_THREADS=1: each rank computes on 1 of {share} cores; set OMP_NUM_THREADS={share}"
