"""Writes curves for TensorBoard and for Weights & Biases."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from sley_core.errors import RunError
from sley_core.protocols import MetricsWriter
from sley_metrics.config import TensorboardConfig, WandbConfig


class TensorboardWriter(MetricsWriter):
    """The writer `metrics.tensorboard`: each number of a row is a point of the curve of its name, at the row's step."""

    def __init__(self, config: TensorboardConfig, folder: Path) -> None:
        self._folder = str(folder / "tensorboard")
        self._flush_s = config.flush_s
        self._writer = self._open()

    def write(self, row: Mapping[str, float | int]) -> None:
        """Queues one point per number except `step`; a thread of TensorBoard's writes them."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def rewind(self, step: int) -> None:
        """Begins another file, which tells TensorBoard to show no earlier point of later steps."""
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        """Closes the writer; on return every point is in the file."""
        self._writer.close()

    def _open(self, purge_step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # needs an extra, which `metrics.wandb` does without

        return SummaryWriter(self._folder, flush_secs=self._flush_s, purge_step=purge_step)


class WandbWriter(MetricsWriter):
    """The writer `metrics.wandb`: each number of a row is a point of the curve of its name, at the row's step.

    Weights & Biases cannot take rows back, so after `rewind` the rows go to another run of the same group. The resolved plan is
    the config of each run there. It begins with the first row, so a run of Sley without a step leaves none.
    """

    def __init__(self, config: WandbConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._run: Any = None

    def write(self, row: Mapping[str, float | int]) -> None:
        """Queues the row's numbers; a process of the package's own sends or keeps them. Raises RunError "metrics-wandb" if the
        run there cannot begin, as without a key.
        """
        self._run = self._run or self._begin()
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def rewind(self, step: int) -> None:
        """Ends the run there, if one has begun; the next row begins another."""
        self.close()

    def close(self) -> None:
        """Ends the run there; the package's own process may write its last rows a moment later. A second call does nothing."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _begin(self) -> Any:
        """Starts a run of Weights & Biases and returns it; raises RunError "metrics-wandb" if that fails."""
        wandb: Any = import_module("wandb")  # an extra, which `metrics.tensorboard` does without
        plan = self._folder / "plan.toml"
        try:
            return wandb.init(
                project=self._config.project,
                entity=self._config.entity,
                name=self._folder.name,
                group=self._folder.name,
                tags=list(self._config.tags),
                mode=self._config.mode,
                dir=str(self._folder),
                config=tomllib.loads(plan.read_text("utf-8")) if plan.exists() else {},
            )
        except wandb.Error as error:
            hint = 'see `wandb login`; `mode = "offline"` keeps the rows in files, which `wandb sync` sends later'
            raise RunError("metrics-wandb", f"Weights & Biases cannot begin: {error}", hint=hint) from error
