"""Describes a run to any engine: how many hosts and ranks, and the command that each rank runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from sley_core.errors import PlanError, UsageError
from sley_core.plan.check import check_plan
from sley_core.plan.plan import Plan


@dataclass(frozen=True)
class Job:
    """Describes a run to an engine.

    nodes, per_node: hosts, and ranks on each; their product is a world that the plan runs on. arguments: of `train-cli` on
    each rank. uses_gpus: whether each rank wants one. goes_on: whether a run that is started again resumes from a checkpoint.
    """

    name: str
    nodes: int
    per_node: int
    arguments: Sequence[str]
    uses_gpus: bool
    goes_on: bool

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def command(self) -> str:
        """`train-cli` with its arguments, for a shell."""
        return shlex.join(("train-cli", *self.arguments))

    @property
    def label(self) -> str:
        """The name as SLURM and Kubernetes take it: small letters, digits and `-`, at most 50 of them, a letter first."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"sley-{plain}")[:50].rstrip("-")


def job_of(plan: Plan, nodes: int, per_node: int | None, arguments: Sequence[str]) -> Job:
    """Returns the job of `plan` on `nodes` hosts. per_node: None for what the plan's world gives each.

    Raises PlanError for a world that the plan does not divide into, with all of its problems; UsageError "per-node" where the
    plan leaves the world open, or does not spread evenly.
    """
    if per_node is None:
        if plan.parallel.dp == "auto":
            raise UsageError(
                "per-node",
                "the plan leaves the number of ranks open (`dp` is auto), so nothing says how many a host has",
                hint="add `--per-node N`",
            )
        per_node, left = divmod(plan.world(), nodes)
        if left or not per_node:
            raise UsageError(
                "per-node",
                f"the plan's {plan.world()} ranks do not spread evenly over {nodes} hosts",
                hint="choose another `--nodes` or `dp`, or `--set 'parallel.dp=\"auto\"'` and `--per-node N`",
            )
    if problems := check_plan(plan, nodes * per_node):
        raise PlanError.many(problems)
    goes_on = plan.checkpoint is not None
    return Job(plan.run.name, nodes, per_node, tuple(arguments), plan.run.device != "cpu", goes_on)
