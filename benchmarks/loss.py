"""The last linear and the cross-entropy: with all logits, with torch's functions, and in chunks of tokens. One process.

Each contestant computes forward and backward of one microbatch, and adds the weight's gradient to an accumulator, as a step
does. Peaks are the bytes above those of hidden states, weight, accumulator and labels: live tensors on a CPU, and those of the
allocator with `--device cuda`. If liger-kernel is installed, its kernel is a contestant, too. On a CPU its bytes count, but not
its time (`TRITON_INTERPRET=1`, `--only memory`).
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peaks import peak_live_mb
from protocol import compare, interleave, noise_of, parser, report
from sley_core.engine.direct import DirectLinear, WeightGradientSink, WeightQueue
from sley_core.engine.step_batch import BatchWeight
from sley_core.losses.chunked_head import HeadChunks, LazyLogits, LogitsHead
from sley_core.losses.cross_entropy import cross_entropy_of_logits

BASE, AGAIN = "all logits", "all logits again"
IGNORED = -100


class Microbatch:
    """Hidden states [n, h], the weight [v, h], its accumulated gradient in fp32, and labels."""

    def __init__(self, num_tokens: int, width: int, num_classes: int, dtype: torch.dtype) -> None:
        self.hidden = torch.randn(num_tokens, width).to(dtype).requires_grad_()
        self.weight = nn.Parameter((0.02 * torch.randn(num_classes, width)).to(dtype))
        self.gradient = torch.zeros(num_classes, width)
        self.labels = torch.randint(num_classes, (num_tokens,))
        self.scale = torch.tensor(1.0 / num_tokens)

    def accumulate(self, rows: Tensor, inputs: Tensor) -> None:
        if rows.dtype == self.gradient.dtype:
            self.gradient.addmm_(rows.t(), inputs)
        else:
            self.gradient += rows.t() @ inputs

    def backward(self, total: Tensor) -> None:
        total.backward(self.scale)  # type: ignore[no-untyped-call]
        self.hidden.grad = None

    def all_logits(self) -> None:
        sink: Any = WeightGradientSink(self.accumulate, WeightQueue())
        logits: Any = DirectLinear.apply(self.hidden, self.weight, None, sink, None)  # type: ignore[no-untyped-call]
        total = cross_entropy_of_logits(logits, self.labels, IGNORED, 0.0)
        del logits
        self.backward(total)

    def in_chunks(self) -> None:
        logits = LazyLogits(_Head(self), self.hidden)
        self.backward(logits.cross_entropy(self.labels, IGNORED, 0.0))

    def torchs(self, function: Callable[[], Tensor]) -> None:
        """Lets autograd compute the weight's gradient of `function`, and adds it."""
        self.backward(function())
        gradient, self.weight.grad = self.weight.grad, None
        assert gradient is not None
        self.gradient += gradient

    def cross_entropy(self) -> Tensor:
        return F.cross_entropy(F.linear(self.hidden, self.weight).float(), self.labels, reduction="sum")

    def linear_cross_entropy(self) -> Tensor:
        options = nn.LinearCrossEntropyOptions()  # from torch 2.13
        return F.linear_cross_entropy(self.hidden, self.weight, self.labels, reduction="sum", options=options)

    def liger(self) -> Tensor:
        functional = import_module("liger_kernel.transformers.functional")
        loss: Tensor = functional.liger_fused_linear_cross_entropy(self.hidden, self.weight, self.labels, reduction="sum")
        return loss


class _Head(LogitsHead):
    """The head of a microbatch."""

    def __init__(self, microbatch: Microbatch) -> None:
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = microbatch.weight
        super().__init__(HeadChunks("", "", None, BatchWeight(lambda: len(microbatch.labels))), linear)
        self.accumulate = microbatch.accumulate  # type: ignore[assignment, method-assign]


def contestants(microbatch: Microbatch) -> dict[str, Callable[[], None]]:
    result: dict[str, Callable[[], None]] = {
        BASE: microbatch.all_logits,
        AGAIN: microbatch.all_logits,
        "in chunks": microbatch.in_chunks,
        "torch cross_entropy": partial(microbatch.torchs, microbatch.cross_entropy),
    }
    if hasattr(F, "linear_cross_entropy"):
        result["torch linear_cross_entropy"] = partial(microbatch.torchs, microbatch.linear_cross_entropy)
    if find_spec("liger_kernel") is not None:
        result["Liger"] = partial(microbatch.torchs, microbatch.liger)
    return result


def run_and_wait(step: Callable[[], None]) -> None:
    step()
    torch.cuda.synchronize()


def peak_allocated_mb(step: Callable[[], None]) -> float:
    """Returns the MiB by which `step` raises the bytes of the CUDA allocator, in its second call."""
    run_and_wait(step)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_and_wait(step)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    options = parser(__doc__ or "", rounds=7)
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--classes", type=int, default=32000)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--only", choices=("times", "memory"), default=None)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    with torch.device(chosen.device):
        microbatch = Microbatch(chosen.tokens, chosen.width, chosen.classes, getattr(torch, chosen.dtype))
    steps = contestants(microbatch)
    title = f"{chosen.tokens} tokens, width {chosen.width}, {chosen.classes} ids, {chosen.dtype}, {chosen.device}"
    if chosen.only in (None, "memory"):
        peak_mb = peak_live_mb if chosen.device == "cpu" else peak_allocated_mb
        peaks = {name: round(peak_mb(step)) for name, step in steps.items() if name != AGAIN}
        report(f"peak MiB, {title}", [], peaks, chosen.json)
    if chosen.only in (None, "times"):
        torch.set_num_threads(chosen.threads)
        if chosen.device == "cuda":
            steps = {name: partial(run_and_wait, step) for name, step in steps.items()}
        rows = compare(interleave(steps, chosen.rounds, warmup=1), BASE)
        report(f"forward and backward, {title}", rows, {"noise": round(noise_of(rows, AGAIN), 3)}, chosen.json)


if __name__ == "__main__":
    main()
