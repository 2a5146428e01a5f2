"""What operators take and layers keep: scratch of the CPU's operators, and what CUDA's kernels save, counted by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.assemble import build_meta_model, weight_dtypes
from sley_core.comm.device import Device
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.model.attention import Attention
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.ledger import Ledger, StepPosition
from sley_estimate.bytes.rank import RankBytes, rank_bytes
from sley_estimate.calibrate import bench as benches
from sley_estimate.calibrate import device as devices
from sley_estimate.calibrate.bench import NUM_HOST_CALLS, ROW_LENGTH, LayerBench
from sley_estimate.layers.operators import OperatorRecorder, imitate_cuda
from sley_estimate.layers.prices import LayerSeconds
from sley_testing.live_bytes import memory_profile, peak_bytes
from sley_testing.plans import changed, small_plan

WIDE, NARROW, WHOLE, FLAG = torch.float32, torch.bfloat16, torch.int64, torch.bool
SIZE = 4096
NUMBERS = 16
"""Bytes of the numbers that stand beside tensors, which torch makes tensors of."""
CASES: dict[str, tuple[Callable[..., Tensor], list[torch.dtype]]] = {
    "a gradient is added to a wider one": (lambda a, b: a.add_(b), [WIDE, NARROW]),
    "a wide one into a narrow one": (lambda a, b: a.add_(b), [NARROW, WIDE]),
    "a result of another type": (lambda a, b, c: torch.mul(a, b, out=c), [WIDE, WIDE, NARROW]),
    "new, of two types": (lambda a, b: a * b, [WIDE, NARROW]),
    "a mask as a factor": (lambda a, b: a * b, [WIDE, FLAG]),
    "whole numbers and a fraction": (lambda a: a * 0.5, [WHOLE]),
    "whole numbers divided": (lambda a, b: a / b, [WHOLE, WHOLE]),
    "compared": (lambda a, b: a < b, [WIDE, NARROW]),
    "chosen": (lambda a, b, c: torch.where(a, b, c), [FLAG, WIDE, WIDE]),
    "masked": (lambda a, b: a.masked_fill(b, 0.0), [WIDE, FLAG]),
    "summed in another type": (lambda a: a.sum(dtype=WIDE), [NARROW]),
    "flags counted": (lambda a: a.sum(), [FLAG]),
    "a mean": (lambda a: a.mean(), [NARROW]),
    "a norm in another type": (lambda a: torch.linalg.vector_norm(a, dtype=WIDE), [NARROW]),
    "of one type": (lambda a, b: a.add_(b), [WIDE, WIDE]),
    "a number beside": (lambda a: a.mul_(2.0), [NARROW]),
    "two at once": (lambda a, b: torch._foreach_mul([a, b], 2.0)[0], [WIDE, WIDE]),
}


@pytest.mark.parametrize(("operate", "dtypes"), CASES.values(), ids=CASES)
def test_it_is_what_the_allocator_says(operate: Callable[..., Tensor], dtypes: list[torch.dtype]) -> None:
    given = [torch.ones(SIZE, dtype=dtype) for dtype in dtypes]
    with memory_profile() as profile:
        operate(*given)
    ledger = Ledger(lambda: StepPosition(0, "", ""))
    tensors = FakeTensors(ledger)
    fakes = [tensors.keep_values(one) for one in given]
    for fake in fakes:
        fake.constant = None  # of no values, as activations are
    for _ in range(2):  # asked, and remembered
        operate(*fakes)
    assert ledger.peak()[0] == pytest.approx(peak_bytes(profile), abs=NUMBERS)


HIDDEN, HEADS, FFN, SEQUENCE, MICRO, VOCABULARY = 128, 4, 384, 64, 2, 4096
TOKENS = MICRO * SEQUENCE
PLAN = small_plan(
    run__device="cuda",
    model={"use": "models.llama", "hidden": HIDDEN, "heads": HEADS, "ffn_hidden": FFN, "vocab_size": VOCABULARY},
    data__sequence=SEQUENCE,
    batch={"global_size": MICRO, "micro_size": MICRO},
)


def estimated(texts: Any, **changes: Any) -> RankBytes:
    return rank_bytes(plan_from_dict(changed(PLAN, **changes), texts), 0, 1)


def kept_by_a_block(texts: Any, **changes: Any) -> int:
    """How much more activations a model of one block more has at its peak."""
    few, many = (estimated(texts, model__num_layers=number, **changes) for number in (3, 4))
    assert few.position.layer == many.position.layer == "head"
    return many.alive["activations"] - few.alive["activations"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("compute", "size"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
def test_a_block_keeps_what_the_kernels_save(texts, compute, size, kv_heads):
    """Inputs and outputs of both norms, queries, context and two or four times keys and values, in fp32 as many as queries; of
    the feed-forward both products, the activation and what is multiplied; and numbers of rows in fp32.
    """
    of_groups = 1.0 if compute == "fp32" else kv_heads / HEADS
    wide = HIDDEN * (6 + 2 * of_groups) + 4 * FFN
    rows = 4 * (2 + HEADS)
    tables = 2 * 4 * SEQUENCE * HIDDEN // HEADS  # cosines and sines
    kept = kept_by_a_block(texts, precision={"compute": compute}, model__kv_heads=kv_heads, data__documents="cut")
    assert kept == TOKENS * (wide * size + rows) + tables


def test_documents_take_no_pairs_of_positions(texts):
    """Their kernel knows bounds; a mask would be kept, a byte for each pair."""
    more = {"precision": {"compute": "bf16"}, "data__documents": "pack"}
    kept = kept_by_a_block(texts, **more)
    on_cpu = kept_by_a_block(texts, run__device="cpu", **more)
    assert kept < TOKENS * (2 * (8 * HIDDEN + 4 * FFN) + 4 * (2 + HEADS)) + 4096 < on_cpu


def kept(layer: Any, *given: torch.Tensor) -> int:
    """Bytes that a layer keeps beside what it was given and returns."""
    ledger = Ledger(lambda: StepPosition(0, "", ""))
    with FakeTensors(ledger) as mode, imitate_cuda():
        tensors = [mode.from_tensor(one).requires_grad_() for one in given]
        for one in tensors:
            ledger.ignore(one)
        output = layer(*tensors)
        found = ledger.current_bytes - output.nbytes
        output.sum().backward()
        assert [one.grad.shape for one in tensors] == [one.shape for one in tensors]
    return found


def test_dropout_keeps_a_byte_for_each_element_and_a_norm_a_number_for_each_row():
    x, w = torch.empty(6, 32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16)
    assert kept(lambda x: F.dropout(x, 0.1), x) == 6 * 32
    assert kept(lambda x: F.dropout(x, 0.1, training=False) + 0, x) == 0
    assert kept(lambda x, w: F.rms_norm(x, (32,), w), x, w) == 6 * 4


def test_dropout_is_one_kernel_forward_and_one_backward():
    """Each reads one tensor and writes one, and the byte of each element."""
    with OperatorRecorder() as seen, FakeTensors(Ledger(lambda: StepPosition(0, "", ""))) as mode, imitate_cuda(seen.record):
        x = mode.from_tensor(torch.empty(6, 32, dtype=torch.bfloat16)).requires_grad_()
        dropped = F.dropout(input=x, p=0.1)
        dropped.backward(torch.empty_like(dropped))
    kernels = [(kernel.name, kernel.num_bytes) for kernel in seen.operators("forward")]
    assert kernels == [(f"aten.native_dropout{suffix}", 6 * 32 * (2 + 2 + 1)) for suffix in ("", "_backward")]


def test_a_norm_whose_weight_has_another_type_is_its_formula():
    x, w = torch.empty(6, 32, dtype=torch.bfloat16), torch.empty(32)
    with pytest.warns(UserWarning, match="Mismatch dtype"):
        assert kept(lambda x, w: F.rms_norm(x, (32,), w), x, w) > 2 * 6 * 32


def test_attention_over_documents_multiplies_as_with_their_mask():
    """All pairs of positions, forward, and two and a half times that in its backward."""
    with OperatorRecorder() as seen, FakeTensors(Ledger(lambda: StepPosition(0, "", ""))), imitate_cuda():
        q, k = (torch.empty(2, 16, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
        bounds = torch.empty(2, 3, dtype=torch.int64)
        Attention()(q, k, k, bounds).sum().backward()
    forward, backward = (one for one in seen.operators("forward") if one.flops)
    assert forward.flops == 4 * 2 * 4 * 16 * 16 * 8
    assert backward.flops == 2.5 * forward.flops
    assert backward.num_bytes > forward.num_bytes > 2 * 16 * 4 * 8 * 2


# -- layers that are timed ---------------------------------------------------------------------------------------------


NUM_CALLS = 3


class Additions(TorchDispatchMode):
    """Keeps what tensors of `shapes` were added to in place, by operator; kept, none has the memory of another."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.found: dict[str, list[Tensor]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.addmm_.default) and args[0].shape in self.shapes:
            self.found[func.overloadpacket.__name__].append(args[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class AtOnce(Device):
    """A device that works through a queue, in no time."""

    @property
    def is_async(self) -> bool:
        return True

    def moment(self) -> float:
        return 0.0

    def seconds_between(self, first: object, last: object) -> float:
        return 0.0

    def move(self, tensor: Tensor) -> Tensor:
        return tensor


CPU = Device(torch.device("cpu"))


def additions(
    accumulation: str, compute: str = "fp32", *, split: bool = False, device: Device = CPU
) -> tuple[dict[str, list[Tensor]], int, LayerSeconds]:
    """What was added to while the first block was timed, how many weights its linears have, and its times."""
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    plan = plan_from_dict(small_plan(data=data, precision={"compute": compute, "accumulation": accumulation}))
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = build_meta_model(plan, dataset.info)
    bench = LayerBench(plan, device, model, dataset, weight_dtypes(plan)[0], NUM_CALLS)
    embed, block = model.layers[:2]
    _, value = bench.time(embed, None)
    weights = [one.weight for one in block.module.modules() if isinstance(one, nn.Linear)]
    with Additions({weight.shape for weight in weights}) as seen:
        times, _ = bench.time(block, value, split=split)
    return seen.found, len(weights), times


@pytest.mark.parametrize(
    ("accumulation", "compute", "operator"),
    [("autograd", "fp32", "add_"), ("autograd", "bf16", "add_"), ("direct", "fp32", "addmm_")],
)
def test_a_backward_adds_to_the_same_memory_each_time_as_the_plan_says(accumulation, compute, operator) -> None:
    found, num_weights, _ = additions(accumulation, compute)
    assert found.keys() == {operator}
    assert len(found[operator]) == num_weights * (1 + NUM_CALLS)
    assert len({tensor.data_ptr() for tensor in found[operator]}) == num_weights
    assert {tensor.dtype for tensor in found[operator]} == {torch.float32}


def test_a_split_backward_of_narrow_weights_adds_its_products_too() -> None:
    """Autograd has no gradient for the hook that adds it in the wider type: its product waits in the queue."""
    found, num_weights, _ = additions("autograd", "bf16", split=True)
    assert len(found["add_"]) == 2 * num_weights * (1 + NUM_CALLS), "whole backwards, and products of split ones"


def test_a_device_that_is_faster_than_its_host_is_waited_for_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half takes the host's seconds, of one call of the row; split ones multiply as often, and add to the same memory."""
    reads = count()  # a second from one reading of the clock to the next
    clock = SimpleNamespace(perf_counter=lambda: float(next(reads)))
    monkeypatch.setattr(benches, "time", clock)
    monkeypatch.setattr(benches, "time_empty_backward", lambda device: 0.05)
    monkeypatch.setattr(benches, "HOST_S", 0.0)
    monkeypatch.setattr(devices, "WRITTEN_BYTES", {"cpu": 1})
    found, num_weights, times = additions("autograd", split=True, device=AtOnce(CPU.torch_device))
    assert astuple(times) == pytest.approx(
        (0.0,) * 4 + (1 / ROW_LENGTH, 1 / ROW_LENGTH - 0.05, 1 / ROW_LENGTH - 0.05, 1 / ROW_LENGTH)
    )
    assert times.total_s == pytest.approx(2 / ROW_LENGTH - 0.05), "the slower counts"
    assert len(found["addmm_"]) == num_weights * (1 + NUM_HOST_CALLS + NUM_CALLS + ROW_LENGTH)
    assert len({tensor.data_ptr() for tensor in found["addmm_"]}) == num_weights
