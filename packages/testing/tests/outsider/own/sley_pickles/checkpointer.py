"""Saves a run as a folder of pickles: one of each rank's tensors, and `run.pickle`, the last, with everything else."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sley_core.api.state import SavedRun, TrainingState, WholeTensors
from sley_core.errors import RunError
from sley_core.protocols import Checkpointer, RestoreResult
from sley_pickles.plugin import PicklesConfig


class Pickles(Checkpointer):
    def __init__(self, config: PicklesConfig | None, state: TrainingState) -> None:
        self.config = config
        self.state = state
        self.rank = state.parts.world.rank
        self.control = state.parts.groups["control"]

    def is_due(self, step: int) -> bool:
        return self.config is not None and step % self.config.every_steps == 0

    def save(self, path: str | Path | None, step: int) -> str:
        self.state.agree("saving a checkpoint")
        self.state.attempt.begin(step)
        folder = Path(path or f"{self.state.folder}/step-{step:08}")
        self.state.all_or_none(lambda: self._write(folder), "write the checkpoint", "checkpoint-failed")
        description, values = self.state.all_or_none(lambda: self._describe(step), "read the state", "checkpoint-failed")
        description = description.with_ranks(self.control.gather_objects(values, label="the values of each rank"))
        self.state.all_or_none(lambda: self._write_description(folder, description), "end the checkpoint", "checkpoint-failed")
        if path is None:
            self.state.attempt.record_save(step)
        return str(folder)

    def load(self, path: str | Path, *, allow_fresh_start: bool) -> RestoreResult | None:
        self.state.agree("loading a checkpoint")
        newest = sorted(Path(self.state.folder or path).glob("step-*/run.pickle"))[-1:]
        if str(path) == "auto" and not newest:
            if not allow_fresh_start:
                self.state.attempt.refuse_fresh_start(f"`{self.state.folder}`")
            return None
        folder = newest[0].parent if str(path) == "auto" else Path(path)
        saved = self.state.all_or_none(lambda: self._read(folder), "read the checkpoint")
        notes = self.state.restore(saved)
        return RestoreResult(str(folder), saved.description.step, saved.description.lineage, notes)

    def _describe(self, step: int) -> tuple[SavedRun, dict[str, Any]]:
        return self.state.describe(step), self.state.rank_values()  # only rank 0 knows the attempt that took the steps

    def _write(self, folder: Path) -> None:
        """Writes this rank's parts of tensors. If several ranks have the same part, each of them writes it."""
        folder.mkdir(parents=True, exist_ok=True)
        parts = [(piece.name, piece.shape, piece.rectangle, piece.tensor.cpu().clone()) for piece in self.state.pieces()]
        (folder / f"rank-{self.rank}.pickle").write_bytes(pickle.dumps(parts))

    def _write_description(self, folder: Path, description: SavedRun) -> None:
        if self.rank == 0:
            (folder / "run.pickle").write_bytes(pickle.dumps(description))

    def _read(self, folder: Path) -> WholeTensors:
        """Joins the parts of all ranks, since this run may have another layout."""
        description = pickle.loads((folder / "run.pickle").read_bytes())
        tensors: dict[str, Tensor] = {}
        for rank in range(description.layout["world"]):
            for name, shape, rectangle, part in pickle.loads((folder / f"rank-{rank}.pickle").read_bytes()):
                tensors.setdefault(name, torch.empty(shape, dtype=part.dtype))[rectangle.slices] = part
        if not tensors:
            raise RunError("checkpoint-damaged", f"{folder} has no tensors")
        return WholeTensors(description, tensors, str(folder))
