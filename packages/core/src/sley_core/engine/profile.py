"""`[profile] steps = [10, 12]`: records a Chrome trace of those steps on every rank, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from sley_core.comm.device import Device


class StepProfiler:
    """Records steps `first` to `last` (counted from 1, both included) into `folder/trace-rank{rank}.json`."""

    def __init__(self, first: int, last: int, folder: Path, rank: int, device: Device) -> None:
        self.first = first
        self.last = last
        self.path = folder / f"trace-rank{rank}.json"
        self._cuda = device.type == "cuda"
        self._profile: torch.profiler.profile | None = None

    def before_step(self, number: int) -> None:
        """Starts the recording if `number` is the first step to record."""
        if number == self.first:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            # There is only one cycle; without `acc_events` torch 2.11 warns that events of former cycles are dropped.
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()

    def after_step(self, number: int) -> None:
        if number == self.last:
            self.close()

    def close(self) -> None:
        """Stops the recording and writes the file; a run that ends within the range writes its part."""
        if self._profile is not None:
            recorded, self._profile = self._profile, None
            recorded.stop()
            recorded.export_chrome_trace(str(self.path))
