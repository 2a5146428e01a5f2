"""Writes the totals of a run into `summary.json`. Imports no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sley_core.json_text import write_json

NAME = "summary.json"
NUM_LAST = 20
"""Over how many of the last steps the mean loss is taken: one step's loss says more of its batch than of the model."""


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before its first step.

    parameters, trained: elements of the whole model's, and of those that are not frozen. samples_per_step: over all ranks.
    samples_per_epoch: None for a stream. tokens_per_sample: None for data without sequences, or of
    several lengths. device: as a person names it, `NVIDIA H100 80GB HBM3` or `cpu`. world: number of
    ranks. plugins: distribution and version by plugin. versions: of Python, torch and whatever else decides the numbers.
    """

    name: str
    device: str
    world: int
    plugins: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0
    trained: int = 0
    samples_per_step: int = 0
    samples_per_epoch: int | None = None
    tokens_per_sample: int | None = None

    def epochs(self, steps: int) -> float | None:
        """Returns how often `steps` steps see each sample; None for a stream."""
        return steps * self.samples_per_step / self.samples_per_epoch if self.samples_per_epoch else None


class RunTotals:
    """Sums over the metrics rows of a run; holds a few numbers, however long the run."""

    def __init__(self, rows: Iterable[Mapping[str, float | int]] = ()) -> None:
        """Counts `rows`, the steps so far."""
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self.held_out_loss: float | None = None
        self.losses: deque[float] = deque(maxlen=NUM_LAST)
        self.skipped = 0
        self.memory_mb: float | None = None
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, float | int]) -> None:
        """Counts one step's row; the last `held_out_loss` and peak of memory of any row stay, and of losses those that are
        numbers.
        """
        self.steps += 1
        self.memory_mb = row.get("memory_mb", self.memory_mb)
        self.tokens += int(row.get("tokens", 0))  # rows of data without sequences count samples
        self.seconds += row["seconds"]
        self.skipped += int(row.get("skipped", 0))
        if math.isfinite(row["loss"]):  # else the step was skipped, and its loss says nothing of the model
            self.losses.append(row["loss"])
        if "held_out_loss" in row:
            self.held_out_loss = row["held_out_loss"]


def summary(
    facts: RunFacts,
    outcome: str,
    totals: RunTotals,
    counts: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    memory: Mapping[str, int] = MappingProxyType({}),
    notes: Iterable[str] = (),
) -> dict[str, Any]:
    """Returns the content of `summary.json`, a pure function of its arguments.

    counts: `Run.counts` of rank 0, by the name in the plan. memory: `Run.memory.bytes` of rank 0, in bytes. notes: what went
    wrong and did not end the run.
    outcome: `"finished"`, `"interrupted"` or `"failed"`. Losses are null if there was no step, or no evaluation;
    `tokens_per_s`, null for data without sequences, and `samples_per_s` are over all steps, the first and slow ones too;
    `memory_mb` is the peak as in the rows.
    """
    losses = list(totals.losses)
    samples = totals.steps * facts.samples_per_step
    return {
        "name": facts.name,
        "outcome": outcome,
        "steps": totals.steps,
        "skipped_steps": totals.skipped,
        "final_loss": losses[-1] if losses else None,
        f"mean_loss_last_{NUM_LAST}": sum(losses) / len(losses) if losses else None,
        "held_out_loss": totals.held_out_loss,
        "tokens": totals.tokens,
        "seconds": totals.seconds,
        "tokens_per_s": totals.tokens / totals.seconds if totals.tokens and totals.seconds > 0 else None,
        "samples": samples,
        "samples_per_s": samples / totals.seconds if totals.seconds > 0 else None,
        "epochs": facts.epochs(totals.steps),
        "parameters": facts.parameters,
        "trained_parameters": facts.trained,
        "memory_bytes": dict(memory),
        "memory_mb": totals.memory_mb,
        "world": facts.world,
        "device": facts.device,
        "plugins": dict(facts.plugins),
        "versions": dict(facts.versions),
        "counts": {name: dict(values) for name, values in counts.items()},
        "notes": list(notes),
    }


def write_summary(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes `summary.json` into the run's folder atomically."""
    write_json(folder / NAME, content)
