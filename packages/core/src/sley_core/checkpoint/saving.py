"""The agreement of all ranks before a save: that they save the same thing in the same place, and who writes what of it."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sley_core.attempt import ID_LENGTH, Attempt, Lineage
from sley_core.checkpoint.choosing import index_or_none
from sley_core.checkpoint.index import INDEX, CheckpointIndex
from sley_core.checkpoint.reader import read_header
from sley_core.checkpoint.run_tensors import RunTensors, generators
from sley_core.checkpoint.shares import Listed, Shares, from_lists, listed, share_out
from sley_core.checkpoint.tensor_file import chunks_of
from sley_core.checkpoint.verify import is_ours, ready, step_name
from sley_core.checkpoint.writing import Writing
from sley_core.comm.collectives import gather_objects
from sley_core.errors import RunError, SleyError
from sley_core.factory import cause
from sley_core.files.folders import GONE, STAGING, Folder, open_folder

if TYPE_CHECKING:
    from sley_core.checkpoint.tensor_file import TensorPiece
    from sley_core.plan.plan import Plan


class Destination(NamedTuple):
    """Says where a checkpoint is written. path: its own folder, or a folder of several checkpoints."""

    path: str
    is_of_several: bool


class Preparation:
    """Prepares the saves of one rank. state: returns what the run keeps besides tensors, as JSON, the same on all ranks.

    Remembers who writes what for as long as no rank holds other tensors than at the last save, and which checkpoints this run
    wrote.
    """

    def __init__(self, plan: Plan, tensors: RunTensors) -> None:
        self.plan = plan
        self.tensors = tensors
        self._shares: tuple[list[str], Shares] | None = None
        self._lineages: dict[str, Lineage] = {}

    def prepare(
        self,
        where: Destination,
        step: int,
        state: dict[str, Any],
        resolved: str,
        keep: int | None,
        attempt: Attempt | None,
    ) -> Writing:
        """Agrees with all ranks on a save, and returns what this rank has to write. keep: how many checkpoints of the run to
        keep in a folder of several; None for all. attempt: the run's; None on ranks other than 0.

        All ranks call it: one blocking exchange over `control`, and a second if some rank holds other tensors than before.
        Raises RunError on all ranks alike.
        """
        world, control = self.tensors.parts.world, self.tensors.parts.groups["control"]
        pieces, own, why = self._held()
        lines = listed(pieces)
        chosen = ["", "", ""] if attempt is None or why else self._target(where, step, attempt)
        said = [why, where.path, sha256(json.dumps(state).encode()).hexdigest(), _digest(lines), chosen]
        # All ranks come here, with an error too: nobody waits for one that has none.
        everyone = gather_objects(said, control, what="what ranks are about to save")
        _, token, problem = everyone[0][4]
        _raise_first([one[0] for one in everyone] + [problem], control.ranks)
        _same([one[1] for one in everyone], "folder", control.ranks)
        _same([one[2] for one in everyone], "data, position in them, or loss scale", control.ranks)
        target = open_folder(everyone[0][4][0])
        shares = self._shared([one[3] for one in everyone], lines)
        files = [[pieces[number] for number in numbers] for numbers in shares.of_rank[world.rank]]
        facts = {"run": self.plan.run.name, "step": step, "token": token}
        return Writing(
            world.rank,
            world.size,
            target.staging(token),
            target,
            files,
            facts,
            own,
            self._index(step, token, () if attempt is None else attempt.lineage, resolved, shares, state),
            # Half, so that rank 0 says who is missing before the others stop waiting for it.
            self.plan.limits.collective_timeout_s / 2,
            lambda piece: chunks_of(piece.tensor),
            partial(self._prune, open_folder(where.path), keep, attempt)
            if keep and where.is_of_several and attempt is not None
            else _nothing,
        )

    def problem(self, path: str, attempt: Attempt | None) -> str:
        """Returns why the run cannot save in the folder of several checkpoints at `path`; "" if nothing is known."""
        return self._of_another_run(open_folder(path), attempt)

    def _of_another_run(self, folder: Folder, attempt: Attempt | None) -> str:
        """Returns a text if the newest readable checkpoint of a folder is of a run of another name; else ""."""
        own = self.plan.run.name
        for name in ready(folder):
            index = index_or_none(folder.child(name))
            if index is not None and index.run != own and (attempt is None or not attempt.wrote(index.lineage)):
                return f"the folder {folder.text} has checkpoints of the run {index.run!r}, and this one is {own!r}"
            if index is not None:
                return ""
        return ""

    def _prune(self, folder: Folder, keep: int, attempt: Attempt) -> None:
        """Deletes all but the newest `keep` checkpoints of this run in `folder`; the newest has just been verified."""
        with suppress(Exception):  # one too many is no reason to lose the one that was written
            names = ready(folder)
            self._lineages = {name: one for name, one in self._lineages.items() if name in names}
            for name in [name for name in names if self._is_own(folder, name, attempt)][keep:]:
                folder.child(name).remove()

    def _is_own(self, folder: Folder, name: str, attempt: Attempt) -> bool:
        """Returns whether an attempt of this run wrote the checkpoint `name`."""
        if name not in self._lineages:
            if (index := index_or_none(folder.child(name))) is None:
                return False
            self._lineages[name] = index.lineage
        return attempt.wrote(self._lineages[name])

    def _held(self) -> tuple[list[TensorPiece], dict[str, Any], str]:
        """Returns this rank's tensors, what it keeps for itself, and the text of an error if it cannot save, else ""."""
        try:
            own = {
                "values": self.tensors.values(),
                "paths": self.tensors.paths(),
                "rank": {"generators": generators(self.tensors.parts.world.device)},
            }
            return self.tensors.pieces(), own, ""
        except SleyError as error:
            first = error.diagnostics[0]
            return [], {}, f"{first.message} ({first.hint})" if first.hint else first.message
        except Exception as error:  # of a part of the run that keeps something: the other ranks wait for an answer
            return [], {}, cause(error)

    def _target(self, where: Destination, step: int, attempt: Attempt) -> list[str]:
        """Returns the folder, a token for this save, and the text of an error, if any; removes what is left of earlier
        saves.
        """
        try:
            folder = open_folder(where.path)
            names = folder.names()
            token = f"{attempt.id}{secrets.token_hex(8)}"
            if not where.is_of_several:
                problem = f"there is something in {folder.text} already" if names else ""
                return [folder.text, token, problem]
            remove_unfinished(folder, attempt)
            if names and (problem := self._of_another_run(folder, attempt)):
                return ["", "", problem]
            return [folder.child(step_name(step, names)).text, token, ""]
        except Exception as error:  # whatever a file system raises
            return ["", "", f"the folder {where.path} cannot be read: {cause(error)}"]

    def _shared(self, digests: list[str], lines: list[Listed]) -> Shares:
        """Returns who writes what; the exchange of the lists is skipped on all ranks alike if none has changed."""
        if self._shares is None or self._shares[0] != digests:
            control = self.tensors.parts.groups["control"]
            # All ranks: they have compared the same digests with those of the same last save.
            everyone = gather_objects(lines, control, what="what ranks hold")
            self._shares = digests, share_out([from_lists(one) for one in everyone])
        return self._shares[1]

    def _index(
        self, step: int, token: str, lineage: Lineage, resolved: str, shares: Shares, state: dict[str, Any]
    ) -> CheckpointIndex:
        topology = self.tensors.parts.topology
        layout = {axis: topology.size_of(axis) for axis in ("pp", "dp", "sp", "wp")}
        return CheckpointIndex(
            self.plan.run.name,
            step,
            token,
            lineage,
            resolved,
            {"torch": torch.__version__, **{name: str(plugin) for name, plugin in self.plan.plugins.items()}},
            layout | {"world": topology.world},
            self.plan.optimizer.name,
            {},
            shares.tensors,
            state=state,
        )


def remove_unfinished(folder: Folder, attempt: Attempt) -> None:
    """Deletes what interrupted saves of this run have left in a folder of checkpoints."""
    for name in folder.names():
        if is_ours(name) and folder.is_unfinished(name, INDEX) and _writer(folder, name) in {*attempt.ids, GONE}:
            folder.child(name).remove()


def _writer(folder: Folder, name: str) -> str:
    """Returns the attempt that began to write the unfinished checkpoint `name`; "gone" for one that is being deleted."""
    if name.startswith(STAGING):
        return name.rpartition("-")[2][:ID_LENGTH]
    with suppress(Exception):  # at a URL it has its final name; whatever a file system raises
        for file in folder.child(name).names():
            if file.endswith(".safetensors"):
                return str(read_header(folder.child(name), file)[1]["token"])[:ID_LENGTH]
    return ""


def _nothing() -> None: ...


def absolute(path: str | Path) -> str:
    """Returns a path or URL that does not depend on the current directory."""
    return open_folder(path).text


def _digest(lines: list[Listed]) -> str:
    return sha256(json.dumps(lines).encode()).hexdigest()


def _raise_first(problems: list[str], ranks: tuple[int, ...]) -> None:
    for rank, problem in zip([*ranks, 0], problems, strict=True):
        if problem:
            raise RunError("checkpoint-failed", f"rank {rank} cannot save: {problem}")


def _same(values: list[str], what: str, ranks: tuple[int, ...]) -> None:
    """Raises RunError "ranks-differ" if the ranks' `values` are not all equal. what: names them in the error."""
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            message = f"ranks {ranks[0]} and {rank} are about to save with another {what}"
            raise RunError("ranks-differ", message, hint="all ranks save the same at the same time")
