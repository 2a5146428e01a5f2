"""The row of a step: what it did, how long it took, and what part of the device's peak that is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sley_core.metrics.memory import memory_mb

Row = dict[str, float | int]
"""One optimizer step as the metrics writers receive it; `mfu` is there where the device's peak is known."""


class Meter:
    """Times the steps and makes their rows.

    flops_per_token: see `sley_core.metrics.flops`. peak_flops: FLOP/s of all devices of the run together, None where
    not known. now: a clock in seconds.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._now = now
        self._since = now()

    def start(self) -> None:
        """What was before this moment belongs to no step (assembly, an evaluation)."""
        self._since = self._now()

    def lap(self) -> float:
        """Seconds since `start` or the last `lap`, whichever was later: the laps of a run leave no gap."""
        now = self._now()
        seconds, self._since = now - self._since, now
        return seconds

    def row(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        seconds: float,
        data_wait_s: float,
    ) -> Row:
        """The row of one step.

        step: from 1. loss: the mean over the step's labels. grad_norm: before clipping. lr: the rate of parameters
        that no group gives another. tokens: of this step, over all ranks. seconds: a `lap`. data_wait_s: how much of it
        this rank waited for data. The row adds tokens_per_s, memory_mb (this rank's high-water mark, MiB), and mfu.
        """
        tokens_per_s = tokens / seconds if seconds > 0 else 0.0
        row: Row = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens_per_s,
            "data_wait_s": data_wait_s,
            "memory_mb": memory_mb(self.device),
        }
        if self.flops_per_token is not None and self.peak_flops is not None:
            row["mfu"] = tokens_per_s * self.flops_per_token / self.peak_flops
        return row
