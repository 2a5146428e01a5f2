"""Peak memory of a piece of work: live tensor bytes, and the process's high-water mark above the state after imports.

Each contestant is measured alone, in processes made for it.
"""

import gc

import torch

from protocol import Step
from sley_testing.live_bytes import memory_profile, peak_bytes
from sley_trainer.row_metrics import peak_memory_mb


def peak_live_mb(work: Step) -> float:
    """MiB of tensors that were alive at once during `work`, construction included if it constructs."""
    torch.set_num_threads(1)
    with memory_profile() as profile:
        work()
    return peak_bytes(profile) / 2**20


def peak_resident_mb(work: Step) -> float:
    """MiB by which `work` raises the high-water mark of this process's resident memory."""
    torch.set_num_threads(1)
    gc.collect()
    before = peak_memory_mb(torch.device("cpu"))
    work()
    return peak_memory_mb(torch.device("cpu")) - before
