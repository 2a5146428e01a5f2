"""Speed on one H100 or H200: MFU beside a plain PyTorch loop, two cells that others publish, kernels, and the host's time.

    python benchmarks/gpu.py                   every part, at most eight minutes
    python benchmarks/gpu.py --parts a,f       some parts
    python benchmarks/gpu.py --tiny            every part with small shapes, on a CPU if there is no device, in about a minute

a  a Llama of 1.2 billion parameters, bf16, sequences of 4,096 tokens: a plain loop and Sley, both eager, then both compiled
b  fine-tuning of Qwen3-0.6B's shape on 8,192 packed tokens, beside prime-rl's 26,000 tokens/s (its BENCHMARKS.md, 2026-02)
c  Llama-3.1-8B's shape with LoRA, beside NeMo Automodel's 12,473 tokens/s (its performance summary; two samples per microbatch)
d  two ranks on one device, or on two: compiled layers with sharded weights have the numbers of one process
e  the attention kernels of this torch
f  the host time that the engine adds to a step

Each part runs in processes of its own, so that its memory is free for the next one. A part that fails, or a missed target, sets
the exit code 1. The plan tables need the packages core, models and testing; transformers and peft are not used. Published
figures are from an H100. TFLOP/s and MFU follow `sley_trainer.row_metrics.model_flops`, for the plain loop too.
"""

import argparse
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention

import overhead
from gpu_models import BETAS, CLIP_NORM, LR, PlainLoop
from protocol import compare, interleave
from sley_core.comm.world import World
from sley_core.engine.step_batch import BatchCounts
from sley_core.plan.load import plan_from_dict
from sley_models.llama import build_llama
from sley_models.plugin import LlamaConfig
from sley_testing.live_bytes import Figure, note_figure
from sley_testing.plans import build_model_with_values
from sley_testing.ranks import Ranks
from sley_testing.runs import assert_parity, record
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

PART_TIMEOUT_S = 300.0
MIN_SPEED = 0.99
"""The target of compiled Sley's speed, relative to the compiled plain loop."""
MIN_MFU = 0.5
SAME_LOSS = {"fp32": 1e-5, "bf16": 2e-2}
"""How close the losses of Sley and the plain loop must be, relative."""


@dataclass(frozen=True)
class Workload:
    """A model with the batch of a step. sizes: the keys of `[model]`. micro_size, num_microbatches: of each step.
    has_documents: whether samples are packed documents with prompts that have no labels.
    """

    sizes: dict[str, Any]
    sequence: int
    micro_size: int
    num_microbatches: int
    num_rounds: int
    has_documents: bool = False
    compute: str = "bf16"

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a step."""
        return self.sequence * self.micro_size * self.num_microbatches


LLAMA_3 = {"heads": 32, "kv_heads": 8, "vocab_size": 128_256, "rope_theta": 500_000.0}
QWEN_3 = {"heads": 16, "kv_heads": 8, "vocab_size": 151_936, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True}
LLAMA_1B = {"num_layers": 16, "hidden": 2048, "ffn_hidden": 8192, **LLAMA_3, "tie_embeddings": True}
LLAMA_8B = {"num_layers": 32, "hidden": 4096, "ffn_hidden": 14_336, **LLAMA_3}
QWEN_600M = {"num_layers": 28, "hidden": 1024, "head_dim": 128, "ffn_hidden": 3072, **QWEN_3, "tie_embeddings": True}
TINY = {"num_layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 128, "vocab_size": 256}

PRETRAINING = Workload(LLAMA_1B, 4096, 1, 4, num_rounds=12)  # both contestants fit into 80 GB
FINE_TUNING = Workload(QWEN_600M, 8192, 1, 4, num_rounds=10, has_documents=True)
ADAPTERS = Workload(LLAMA_8B, 4096, 1, 4, num_rounds=6)
TINY_PRETRAINING = Workload({**TINY, "tie_embeddings": True}, 64, 2, 2, num_rounds=4)
TINY_FINE_TUNING = Workload({**TINY, "qk_norm": True}, 64, 1, 2, num_rounds=2, has_documents=True)
TINY_ADAPTERS = Workload(TINY, 64, 2, 1, num_rounds=2)


def plan_tables(work: Workload, device: str, *, is_compiled: bool, **tables: Any) -> dict[str, Any]:
    """Returns the tables of a plan that trains `work`. tables: other tables, which replace these."""
    return {
        "run": {"name": "gpu", "steps": 1_000_000, "device": device},
        "model": {"use": "models.llama", **work.sizes, "compile": is_compiled},
        "data": {
            "factory": "noise:PackedNoise" if work.has_documents else "noise:Noise",
            "options": {"sequence": work.sequence, "vocabulary": work.sizes["vocab_size"]},
        },
        "batch": {"global_size": work.micro_size * work.num_microbatches, "micro_size": work.micro_size},
        "precision": {"compute": work.compute},
        "optimizer": {"use": "core.adamw", "lr": LR, "betas": BETAS, "clip_norm": CLIP_NORM},
        **tables,
    }


# -- speed of training -------------------------------------------------------------------------------------------------


class Contestant:
    """A training step with its first results. first_s: the seconds of the first step, which compiles. peak_bytes: the peak of
    a later step above the memory before `make_step` was called; None on a CPU.
    """

    def __init__(self, make_step: Callable[[], Callable[[], float]], device: str) -> None:
        self.is_on_gpu = device == "cuda"
        base_bytes = torch.cuda.memory_allocated() if self.is_on_gpu else 0
        self._step = make_step()
        start_s = time.perf_counter()
        self.losses = [self()]
        self.first_s = time.perf_counter() - start_s
        self.losses.append(self())
        if self.is_on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.losses.append(self())
        self.peak_bytes = torch.cuda.max_memory_allocated() - base_bytes if self.is_on_gpu else None

    def __call__(self) -> float:
        """Takes one step, waits for the device, and returns the loss."""
        loss = self._step()
        if self.is_on_gpu:
            torch.cuda.synchronize()
        return loss


def speed_text(run: Run, work: Workload, counts: BatchCounts, seconds: float, peak_bytes: int | None) -> str:
    """Returns the tokens/s, TFLOP/s, MFU and peak memory of a step that takes `seconds`."""
    flops_per_s = run.samples.meter.flops.total(counts) / seconds
    peak_flops = run.samples.meter.peak_flops
    text = f"{work.num_tokens / seconds:,.0f} tok/s, {flops_per_s / 1e12:,.3g} TFLOP/s"
    text += f", MFU {100 * flops_per_s / peak_flops:.1f} %" if peak_flops else ""
    return text + (f", {peak_bytes / 2**30:.1f} GiB" if peak_bytes is not None else "")


def measure_pretraining(device: str, is_tiny: bool) -> list[Figure]:
    """(a) Compares Sley with a plain loop, eager and compiled."""
    work = TINY_PRETRAINING if is_tiny else PRETRAINING
    return [figure for is_compiled in (False, True) for figure in compare_with_plain_loop(work, device, is_compiled)]


def compare_with_plain_loop(work: Workload, device: str, is_compiled: bool) -> list[Figure]:
    """Trains `work` with Sley and the plain loop in turns. Raises AssertionError if the losses differ."""
    label = "a, compiled" if is_compiled else "a, eager"
    plan = plan_from_dict(plan_tables(work, device, is_compiled=is_compiled))
    with World.alone(device) as world, assemble(plan, world) as run:
        assert run.feed is not None
        batch = run.feed.next()
        contestants = {
            "Sley": Contestant(lambda: lambda: float(run.step(batch)["loss"]), device),
            "plain loop": Contestant(lambda: partial(make_plain_loop(work, device, is_compiled).step, batch), device),
        }
        assert_same_losses(contestants["plain loop"].losses, contestants["Sley"].losses, SAME_LOSS[work.compute])
        seconds = interleave(contestants, work.num_rounds, warmup=1)
        sley, plain = compare(seconds, "plain loop")
        counts, peak_flops = run.samples.meter.count(batch), run.samples.meter.peak_flops
        figures = [
            Figure(
                f"{label}: {row.name}", speed_text(run, work, counts, row.milliseconds / 1e3, contestants[row.name].peak_bytes)
            )
            for row in (plain, sley)
        ]
        speed, low, high = 1 / sley.ratio, 1 / sley.high, 1 / sley.low
        figure = Figure(f"{label}: Sley's speed relative to the plain loop", f"{speed:.3f} [{low:.3f}, {high:.3f}]")
        if is_compiled and device == "cuda":
            figure = figure._replace(target=f">= {MIN_SPEED}", is_met=speed >= MIN_SPEED)
        figures += [figure]
        if is_compiled:
            figures += [Figure("a, compiled: Sley's first step, which compiles", f"{contestants['Sley'].first_s:.1f} s")]
        if is_compiled and peak_flops is not None:
            mfu = run.samples.meter.flops.total(counts) / peak_flops / (sley.milliseconds / 1e3)
            figures += [Figure("a, compiled: Sley's MFU", f"{100 * mfu:.1f} %", f">= {100 * MIN_MFU:.0f} %", mfu >= MIN_MFU)]
        if device == "cuda":
            num = count_synchronisations(run, batch)
            figures += [Figure(f"{label}: waits of the host within a step", str(num), "0", num == 0)]
    return figures


def make_plain_loop(work: Workload, device: str, is_compiled: bool) -> PlainLoop:
    """Returns the plain loop with the initial weights of the run's seed."""
    dtype = torch.bfloat16 if work.compute == "bf16" else torch.float32
    model = build_model_with_values(partial(build_llama, LlamaConfig(**work.sizes)), dtype)
    layers = torch.nn.ModuleList(layer.module for layer in model.layers).to(device)  # at once: ties stay
    return PlainLoop(list(layers), work.micro_size, is_compiled=is_compiled)


def assert_same_losses(expected: list[float], actual: list[float], tolerance: float) -> None:
    is_same = all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(expected, actual, strict=True))
    assert is_same, f"the losses are {actual}, but the plain loop has {expected}"


def count_synchronisations(run: Run, batch: dict[str, Tensor]) -> int:
    """Returns how often the host waits for the device between the launch of a step and the reading of its row."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return sum("synchronizing" in str(warning.message) for warning in caught)


def measure_fine_tuning(device: str, is_tiny: bool) -> list[Figure]:
    """(b) Fine-tunes Qwen3-0.6B's shape on packed documents."""
    work = TINY_FINE_TUNING if is_tiny else FINE_TUNING
    return [measure_published("b: SFT, Qwen3-0.6B's shape", work, device, "prime-rl 26,000 tok/s")]


def measure_adapters(device: str, is_tiny: bool) -> list[Figure]:
    """(c) Trains LoRA adapters of Llama-3.1-8B's shape."""
    work = TINY_ADAPTERS if is_tiny else ADAPTERS
    model = {"factory": "gpu_models:adapted_llama", "options": {"rank": 8, **work.sizes}, "compile": True}
    return [measure_published("c: LoRA, Llama-3.1-8B's shape", work, device, "Automodel 12,473 tok/s", model=model)]


def measure_published(label: str, work: Workload, device: str, published: str, **tables: Any) -> Figure:
    """Returns the speed of Sley, compiled, beside a published figure."""
    plan = plan_from_dict(plan_tables(work, device, is_compiled=True, **tables))
    with World.alone(device) as world, assemble(plan, world) as run:
        assert run.feed is not None
        batch = run.feed.next()
        contestant = Contestant(lambda: lambda: float(run.step(batch)["loss"]), device)
        seconds = statistics.median(interleave({"Sley": contestant}, work.num_rounds, warmup=1)["Sley"])
        text = speed_text(run, work, run.samples.meter.count(batch), seconds, contestant.peak_bytes)
    return Figure(label, text, published)


# -- two ranks ---------------------------------------------------------------------------------------------------------


def check_two_ranks(device: str, is_tiny: bool) -> list[Figure]:
    """(d) Trains with sharded weights and compiled layers on two ranks, and one eager process with the same plan.

    Raises AssertionError if their results differ by more than the fp64 tolerance.
    """
    sizes = TINY if is_tiny else {**TINY, "hidden": 256, "num_layers": 4, "ffn_hidden": 704}
    work = Workload(sizes, 64, 1, 4, num_rounds=0, compute="fp64")
    alone = plan_tables(work, device, is_compiled=False)
    layout = {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}}
    sharded = plan_tables(work, device, is_compiled=True, **layout)
    with patch.dict(os.environ, shared_nccl(device)):
        (reference,) = Ranks(1, PART_TIMEOUT_S, init=False)(record, alone, 3)
        layouts = Ranks(2, PART_TIMEOUT_S, init=False)(record, sharded, 3)
        backend = "gloo" if device == "cpu" or (needs_sharing() and "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ) else "NCCL"
    assert_parity(reference, layouts, "fp64")
    return [Figure(f"d: two ranks, wp 2, compiled, over {backend}", "equal to one process", "1e-10 in fp64", True)]


def needs_sharing() -> bool:
    """Returns whether two ranks must share one device."""
    return torch.cuda.device_count() < 2


def shared_nccl(device: str) -> dict[str, str]:
    """Returns the environment in which NCCL lets two ranks share a device, or nothing if this NCCL cannot."""
    if device == "cpu" or not needs_sharing() or torch.cuda.nccl.version() < (2, 30):  # type: ignore[no-untyped-call]
        return {}
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


# -- attention ---------------------------------------------------------------------------------------------------------


class AttentionShape(NamedTuple):
    """The shape of queries, keys and values [b, h, s, d]."""

    batch: int
    heads: int
    sequence: int
    head_dim: int


def time_attention(device: str, is_tiny: bool) -> list[Figure]:
    """(e) Times a causal forward and backward with each kernel that this torch offers."""
    shape = AttentionShape(1, 2, 256, 32) if is_tiny else AttentionShape(2, 32, 4096, 128)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    # A backward takes 2.5 times the products of a forward, and a causal mask hides half of them.
    flops = 3.5 * 4 * shape.batch * shape.heads * shape.sequence**2 * shape.head_dim / 2
    figures, milliseconds = [], {}
    for name, kernel in attention_kernels(shape, device).items():
        try:
            milliseconds[name] = 1e3 * time_kernel(kernel, q, k, v, is_tiny)
            text = f"{milliseconds[name]:.3f} ms, {flops / milliseconds[name] / 1e9:,.3g} TFLOP/s"
        except Exception as error:  # whatever a kernel raises that this machine does not have
            text = f"not available: {str(error).strip().splitlines()[0][:60]}"
        figures.append(Figure(f"e: attention, {name}", text))
    return [*figures, Figure("e: the fastest attention", min(milliseconds, key=milliseconds.__getitem__))]


Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_kernels(shape: AttentionShape, device: str) -> dict[str, Kernel]:
    """Returns the causal kernels by name."""

    def attend(q: Tensor, k: Tensor, v: Tensor, backend: attention.SDPBackend) -> Tensor:
        with attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attend_with_version(q: Tensor, k: Tensor, v: Tensor, version: str) -> Tensor:
        with flash_version(version):
            return attend(q, k, v, attention.SDPBackend.FLASH_ATTENTION)

    @cache
    def compile_flex() -> Any:
        from torch.nn.attention import flex_attention as flex

        sizes = (None, None, shape.sequence, shape.sequence)
        mask = flex.create_block_mask(lambda b, h, query, key: query >= key, *sizes, device=device)
        return torch.compile(partial(flex.flex_attention, block_mask=mask))

    def attend_with_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = compile_flex()(q, k, v)
        return output

    backends = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
    kernels: dict[str, Kernel] = {
        name: partial(attend, backend=getattr(attention.SDPBackend, backend)) for name, backend in backends.items()
    }
    versions = attention.list_flash_attention_impls() if hasattr(attention, "list_flash_attention_impls") else ()
    kernels |= {f"flash {version}": partial(attend_with_version, version=version) for version in versions}
    return kernels | {"flex": attend_with_flex}


@contextmanager
def flash_version(version: str) -> Iterator[None]:
    """Makes `scaled_dot_product_attention` use another flash kernel, such as "FA3". Raises ImportError if it is missing."""
    attention.activate_flash_attention_impl(version)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def time_kernel(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, is_tiny: bool) -> float:
    """Returns the median seconds of a forward and backward."""
    gradient = torch.ones_like(q)

    def step() -> None:
        torch.autograd.grad(kernel(q, k, v), (q, k, v), gradient)
        if q.is_cuda:
            torch.cuda.synchronize()

    return statistics.median(interleave({"kernel": step}, 3 if is_tiny else 10)["kernel"])


# -- the host ----------------------------------------------------------------------------------------------------------


def measure_host_time(device: str, is_tiny: bool) -> list[Figure]:
    """(f) Measures the host time of the engine: a step of a model so small that the host determines its duration, less the same
    step of a plain loop.
    """
    work = Workload(TINY, 32, 4, 1, num_rounds=100 if is_tiny else 300, compute="fp32")
    plan = plan_from_dict(plan_tables(work, device, is_compiled=False))
    with World.alone(device) as world, assemble(plan, world) as run, assemble(plan, world) as plain_run:
        contestants: dict[str, Callable[[], Any]] = {"plain loop": overhead.PlainLoop(plain_run, 1).step, "Sley": run.step}
        for _ in range(3):
            assert_same_losses([contestants["plain loop"]()], [run.step()["loss"]], SAME_LOSS["fp32"])
        seconds = interleave(contestants, work.num_rounds, warmup=10)
    row, plain = compare(seconds, "plain loop")[::-1]
    low, middle, high = ((ratio - 1) * 1e3 * plain.milliseconds for ratio in (row.low, row.ratio, row.high))
    text = f"{middle:.0f} us [{low:.0f}, {high:.0f}], {middle / 10_000:.1%} of a step of 10 ms"
    return [Figure("f: the engine's host time per step", text)]


# -- the command -------------------------------------------------------------------------------------------------------

Part = Callable[[str, bool], list[Figure]]
PARTS: dict[str, Part] = {
    "a": measure_pretraining,
    "b": measure_fine_tuning,
    "c": measure_adapters,
    "d": check_two_ranks,
    "e": time_attention,
    "f": measure_host_time,
}


def run_part(name: str, device: str, is_tiny: bool) -> list[Figure]:
    """Runs a part in its own process. Returns a failure as a figure whose target is missed."""
    part = PARTS[name]
    try:
        if part is check_two_ranks:  # starts the processes itself
            return part(device, is_tiny)
        return Ranks(1, PART_TIMEOUT_S, init=False)(part, device, is_tiny)[0]
    except Exception as error:
        print("\n".join([repr(error), *getattr(error, "__notes__", ())]), file=sys.stderr)
        return [Figure(f"{name}: failed", type(error).__name__, "no failure", False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="the letters of the parts (default: all)")
    parser.add_argument("--tiny", action="store_true", help="use small shapes, which says whether each part works")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() else "cpu"
    if device == "cpu" and not options.tiny:
        print("nothing was measured, because there is no CUDA device; use --tiny to try the parts on the CPU")
        return
    num_missed = 0
    for name in options.parts.split(","):
        start_s = time.perf_counter()
        for figure in run_part(name, device, options.tiny):
            note_figure(figure)
            print(figure, flush=True)
            num_missed += figure.is_met is False
        print(f"   part {name}: {time.perf_counter() - start_s:.0f} s", flush=True)
    sys.exit(int(num_missed > 0))


if __name__ == "__main__":
    main()
