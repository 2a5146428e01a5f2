"""Tests the scratch of CPU operators, the tensors that CUDA kernels save, and the timing of layers."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.comm.device import Device
from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext
from sley_core.model.attention import Attention
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.fake_tensors import FakeTensors, Ledger
from sley_estimate.bytes.rank import run_rank
from sley_estimate.calibrate import bench as benches
from sley_estimate.calibrate import device as devices
from sley_estimate.calibrate.bench import NUM_HOST_CALLS, ROW_LENGTH, LayerBench
from sley_estimate.layers.operators import OperatorRecorder, imitate_cuda
from sley_estimate.layers.times import LayerSeconds
from sley_testing.live_bytes import memory_profile, peak_bytes
from sley_testing.plans import changed, small_plan
from sley_trainer.assemble import build_meta_model, weight_dtypes

WIDE, NARROW, WHOLE, FLAG = torch.float32, torch.bfloat16, torch.int64, torch.bool
SIZE = 4096
NUMBERS = 16
"""Bytes of the tensors that torch makes of numbers."""
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
def test_scratch_equals_that_of_the_allocator(operate: Callable[..., Tensor], dtypes: list[torch.dtype]) -> None:
    inputs = [torch.ones(SIZE, dtype=dtype) for dtype in dtypes]
    with memory_profile() as profile:
        operate(*inputs)
    ledger = Ledger()
    tensors = FakeTensors(ledger)
    fakes = [tensors.keep_values(tensor) for tensor in inputs]
    for fake in fakes:
        fake.constant = None  # without values, as activations are
    for _ in range(2):  # the second call is cached
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


def saved_by_a_block(texts: Any, **changes: Any) -> int:
    """Returns the bytes of activations that one more block adds to the peak."""
    plans = (plan_from_dict(changed(PLAN, model__num_layers=number, **changes), texts) for number in (1, 2))
    few, many = (run_rank(plan, 0, 1)[0] for plan in plans)
    assert few.position.layer == many.position.layer == "head"
    return many.alive["activations"] - few.alive["activations"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("compute", "size"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
def test_a_block_saves_the_tensors_of_its_kernels(texts, compute, size, kv_heads):
    """Expects inputs and outputs of both norms, queries, context and two or four times keys and values, in fp32 as many as
    queries. The feed-forward saves both products, the activation and their product. Row statistics are in fp32.
    """
    of_groups = 1.0 if compute == "fp32" else kv_heads / HEADS
    wide = HIDDEN * (6 + 2 * of_groups) + 4 * FFN
    rows = 4 * (2 + HEADS)
    tables = 2 * 4 * SEQUENCE * HIDDEN // HEADS  # cosines and sines
    saved = saved_by_a_block(texts, precision={"compute": compute}, model__kv_heads=kv_heads, data__documents="cut")
    assert saved == TOKENS * (wide * size + rows) + tables


def test_documents_save_no_mask(texts):
    """The CUDA kernel gets bounds of documents; a mask would need a byte per pair of positions."""
    packed = {"precision": {"compute": "bf16"}, "data__documents": "pack"}
    saved = saved_by_a_block(texts, **packed)
    on_cpu = saved_by_a_block(texts, run__device="cpu", **packed)
    assert saved < TOKENS * (2 * (8 * HIDDEN + 4 * FFN) + 4 * (2 + HEADS)) + 4096 < on_cpu


def saved_bytes(layer: Any, *inputs: torch.Tensor) -> int:
    """Returns the bytes that a layer saves in addition to its inputs and its output."""
    ledger = Ledger()
    with FakeTensors(ledger) as mode, imitate_cuda():
        tensors = [mode.from_tensor(tensor).requires_grad_() for tensor in inputs]
        for tensor in tensors:
            ledger.ignore(tensor)
        output = layer(*tensors)
        num_bytes = ledger.current_bytes - output.nbytes
        output.sum().backward()
        assert [tensor.grad.shape for tensor in tensors] == [tensor.shape for tensor in tensors]
    return num_bytes


def test_dropout_saves_a_byte_per_element_and_a_norm_a_number_per_row():
    x, w = torch.empty(6, 32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16)
    assert saved_bytes(lambda x: F.dropout(x, 0.1), x) == 6 * 32
    assert saved_bytes(lambda x: F.dropout(x, 0.1, training=False) + 0, x) == 0
    assert saved_bytes(lambda x, w: F.rms_norm(x, (32,), w), x, w) == 6 * 4


def test_dropout_is_one_kernel_forward_and_one_backward():
    """Each kernel reads a tensor, writes a tensor, and moves a byte per element."""
    with OperatorRecorder() as recorder, FakeTensors(Ledger()) as mode, imitate_cuda():
        x = mode.from_tensor(torch.empty(6, 32, dtype=torch.bfloat16)).requires_grad_()
        dropped = F.dropout(input=x, p=0.1)
        dropped.backward(torch.empty_like(dropped))
    kernels = [(kernel.name, kernel.num_bytes) for kernel in recorder.operators("forward")]
    assert kernels == [(f"aten.native_dropout{suffix}", 6 * 32 * (2 + 2 + 1)) for suffix in ("", "_backward")]


def test_a_norm_with_a_weight_of_another_dtype_is_not_fused():
    x, w = torch.empty(6, 32, dtype=torch.bfloat16), torch.empty(32)
    with pytest.warns(UserWarning, match="Mismatch dtype"):
        assert saved_bytes(lambda x, w: F.rms_norm(x, (32,), w), x, w) > 2 * 6 * 32


def test_attention_over_documents_multiplies_as_with_their_mask():
    """The forward multiplies all pairs of positions, and the backward two and a half times as much."""
    with OperatorRecorder() as recorder, FakeTensors(Ledger()), imitate_cuda():
        q, k = (torch.empty(2, 16, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
        bounds = torch.empty(2, 3, dtype=torch.int64)
        Attention()(q, k, k, bounds).sum().backward()
    forward, backward = (operator for operator in recorder.operators("forward") if operator.flops)
    assert forward.flops == 4 * 2 * 4 * 16 * 16 * 8
    assert backward.flops == 2.5 * forward.flops
    assert backward.num_bytes > forward.num_bytes > 2 * 16 * 4 * 8 * 2


def test_tensors_that_are_only_written_count_once_and_scattered_rows_alone():
    """`a` and `b` have 64 bytes each, `half` has 32, and an index 8."""
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    half = a.bfloat16()
    with OperatorRecorder() as recorder:
        a.add_(half), a.copy_(half), a.zero_(), torch.mm(b, b, out=a), torch.add(b, b, out=a), torch._foreach_zero_([a, b])
        a.index_add_(0, torch.tensor([1]), b[:1])
    assert [operator.num_bytes for operator in recorder.operators("forward")] == [160, 96, 64, 192, 192, 128, 56]


# -- layers that are timed ---------------------------------------------------------------------------------------------


NUM_CALLS = 3


class Additions(TorchDispatchMode):
    """Records the tensors of `shapes` that operators add to in place, in `targets` by operator. References keep their memory
    from being reused.
    """

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.targets: dict[str, list[Tensor]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.addmm_.default) and args[0].shape in self.shapes:
            self.targets[func.overloadpacket.__name__].append(args[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class InstantDevice(Device):
    """A device with a queue that needs no time."""

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
    """Returns the in-place additions while the first block was timed, the number of its linear weights, and its seconds."""
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    plan = plan_from_dict(small_plan(data=data, precision={"compute": compute, "accumulation": accumulation}))
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = build_meta_model(plan, dataset.info)
    bench = LayerBench(plan, device, model, dataset, weight_dtypes(plan)[0], NUM_CALLS)
    embed, block = model.layers[:2]
    _, value = bench.time_layer(embed, None)
    weights = [module.weight for module in block.module.modules() if isinstance(module, nn.Linear)]
    with Additions({weight.shape for weight in weights}) as recorder:
        times, _ = bench.time_layer(block, value, split=split)
    return recorder.targets, len(weights), times


@pytest.mark.parametrize(
    ("accumulation", "compute", "operator"),
    [("autograd", "fp32", "add_"), ("autograd", "bf16", "add_"), ("direct", "fp32", "addmm_")],
)
def test_a_backward_adds_to_the_same_memory_each_time(accumulation, compute, operator) -> None:
    targets, num_weights, _ = additions(accumulation, compute)
    assert targets.keys() == {operator}
    assert len(targets[operator]) == num_weights * (1 + NUM_CALLS)
    assert len({tensor.data_ptr() for tensor in targets[operator]}) == num_weights
    assert {tensor.dtype for tensor in targets[operator]} == {torch.float32}


def test_a_split_backward_of_narrow_weights_adds_its_products() -> None:
    """The hook that adds gradients in the wider dtype gets none, since products wait in the queue."""
    targets, num_weights, _ = additions("autograd", "bf16", split=True)
    assert len(targets["add_"]) == 2 * num_weights * (1 + NUM_CALLS), "whole backwards, and products of split ones"


def test_the_host_of_a_faster_device_is_timed_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half takes the host's seconds of one call of the row. Split halves add to the same memory."""
    reads = count()  # a second between two readings of the clock
    clock = SimpleNamespace(perf_counter=lambda: float(next(reads)))
    monkeypatch.setattr(benches, "time", clock)
    monkeypatch.setattr(benches, "time_empty_backward", lambda device: 0.05)
    monkeypatch.setattr(benches, "HOST_S", 0.0)
    monkeypatch.setattr(devices, "WRITTEN_BYTES", {"cpu": 1})
    targets, num_weights, times = additions("autograd", split=True, device=InstantDevice(CPU.torch_device))
    call_s = 1 / ROW_LENGTH
    assert astuple(times) == pytest.approx((0.0,) * 4 + (call_s, call_s - 0.05, call_s - 0.05, call_s))
    assert times.total_s == pytest.approx(2 * call_s - 0.05), "the slower counts"
    assert len(targets["addmm_"]) == num_weights * (1 + NUM_HOST_CALLS + NUM_CALLS + ROW_LENGTH)
    assert len({tensor.data_ptr() for tensor in targets["addmm_"]}) == num_weights
    monkeypatch.undo()
    assert 0 < benches.time_empty_backward(CPU) < 0.1
