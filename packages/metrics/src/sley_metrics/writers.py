"""Writes curves for TensorBoard and for Weights & Biases."""

import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from sley_core.errors import RunError
from sley_core.protocols import MetricsWriter
from sley_metrics.plugin import TensorboardConfig, WandbConfig

FLUSH_S = 10
"""The maximum time in seconds until TensorBoard's thread writes a new point to the file."""


class TensorboardWriter(MetricsWriter):
    """The writer `metrics.tensorboard`. Adds each number of a row to the curve with the same name, at the row's step."""

    def __init__(self, config: TensorboardConfig, folder: Path) -> None:
        self._folder = str(folder / "tensorboard")
        self._writer = self._open_file()

    def write(self, row: Mapping[str, float | int]) -> None:
        """Queues a point for each number of the row except `step`. TensorBoard's background thread writes the points."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def rewind(self, step: int) -> None:
        """Starts a new file, which makes TensorBoard hide the points of steps after `step` in earlier files."""
        self._writer.close()
        self._writer = self._open_file(step + 1)

    def close(self) -> None:
        """Writes all queued points and closes the file."""
        self._writer.close()

    def _open_file(self, purge_step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # imported here, since `metrics.wandb` does not need this extra

        return SummaryWriter(self._folder, flush_secs=FLUSH_S, purge_step=purge_step)


class WandbWriter(MetricsWriter):
    """The writer `metrics.wandb`. Adds each number of a row to the curve with the same name, at the row's step. The first row
    starts a W&B run, whose config is the resolved plan. Weights & Biases cannot delete rows, so the first row after `rewind`
    starts another W&B run in the same group.
    """

    def __init__(self, config: WandbConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._run: Any = None

    def write(self, row: Mapping[str, float | int]) -> None:
        """Queues the row's numbers. A process of the package `wandb` sends or stores them. Raises RunError "metrics-wandb" if
        the W&B run cannot start, for example without an API key.
        """
        self._run = self._run or self._start_run()
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def rewind(self, step: int) -> None:
        """Ends the W&B run, if there is one. The next row starts a new run."""
        self.close()

    def close(self) -> None:
        """Ends the W&B run, if there is one, and waits until the rows are sent or stored."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _start_run(self) -> Any:
        """Starts and returns a W&B run. Raises RunError "metrics-wandb" if W&B reports an error."""
        wandb: Any = import_module("wandb")  # imported here, since `metrics.tensorboard` does not need this extra
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
            hint = 'run `wandb login`, or set `mode = "offline"` to store the rows in files for `wandb sync`'
            raise RunError("metrics-wandb", f"Weights & Biases cannot start a run: {error}", hint=hint) from error
