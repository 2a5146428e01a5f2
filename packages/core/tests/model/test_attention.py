"""The attention module against a loop over documents, heads and positions."""

import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.errors import PlanError
from sley_core.model import attention
from sley_core.model.attention import Attention, attention_mask, once_per_field, use_attention_kernel

BATCH, LENGTH, DIM = 2, 11, 6
BOUNDS = [[0, 4, 5, 11, 11], [0, 11, 11, 11, 11]]


def naive(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[list[int]], scale: float | None = None, window: int | None = None
) -> Tensor:
    """softmax(scale q k^T) v, one query at a time."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    rows = []
    for row, starts in enumerate(bounds):
        heads = []
        for head in range(q.shape[2]):
            shared = head * k.shape[2] // q.shape[2]
            context = []
            for at in range(q.shape[1]):
                begin = max(start for start in starts if start <= at)
                begin = begin if window is None else max(begin, at + 1 - window)
                scores = k[row, begin : at + 1, shared] @ q[row, at, head] * scale
                context.append(scores.softmax(0) @ v[row, begin : at + 1, shared])
            heads.append(torch.stack(context))
        rows.append(torch.stack(heads, dim=1))
    return torch.stack(rows)


def inputs(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)

    def one(num_heads: int) -> Tensor:
        drawn = torch.randn(BATCH, LENGTH, num_heads, DIM, dtype=dtype, generator=generator)
        return drawn.requires_grad_()

    return one(heads), one(kv_heads), one(kv_heads)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "scale", "window"), [(4, 4, None, None), (4, 2, 0.3, 3), (4, 1, None, 1), (4, 2, None, LENGTH)]
)
def test_forward_and_gradients_equal_the_naive_form(
    heads: int, kv_heads: int, scale: float | None, window: int | None, packed: bool
) -> None:
    q, k, v = inputs(heads, kv_heads)
    bounds = BOUNDS if packed else [[0]] * BATCH
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if packed else None
    ours = Attention()(q, k, v, cu_seqlens, scale, window)
    oracle = naive(q, k, v, bounds, scale, window)
    torch.testing.assert_close(ours, oracle, rtol=1e-10, atol=1e-12)
    weights = torch.linspace(-1, 1, oracle.numel(), dtype=oracle.dtype).view_as(oracle)
    found, wanted = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (ours, oracle))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_mask_is_built_once_for_all_layers_and_again_when_the_field_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    built, half = [], torch.bfloat16
    real = attention._compute_mask

    def counted(cu_seqlens: Tensor, window: int | None, x: Tensor) -> Tensor:
        built.append(x.dtype)
        return real(cu_seqlens, window, x)

    monkeypatch.setattr(attention, "_compute_mask", counted)
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
    x = torch.empty((len(BOUNDS), LENGTH), dtype=half)
    masks = [attention_mask(cu_seqlens, None, x) for _ in range(3)]
    assert masks[0] is masks[1] is masks[2]
    assert built == [half]
    assert masks[0].unique().tolist() == [float("-inf"), 0.0]
    cu_seqlens[1, 1] = 3
    assert not torch.equal(attention_mask(cu_seqlens, None, x), masks[0])
    attention_mask(cu_seqlens.clone(), None, x)
    attention_mask(cu_seqlens, None, x.float())
    assert built == [half, half, half, torch.float32]


def reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """What torch's varlen kernel promises, for the options that are used here."""
    assert options["window_size"] == (-1, 0)
    assert options["scale"] is None
    assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert torch.equal(bounds_q, bounds_k)
    assert bounds_q[0] == 0
    assert bounds_q[-1] == len(q)
    lengths = bounds_q.diff()
    assert lengths.min() >= 0
    assert lengths.max() <= min(max_q, max_k)
    return naive(q[None], k[None], v[None], [bounds_q.tolist()])[0]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rows_are_laid_end_to_end_for_the_varlen_kernel(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    monkeypatch.setattr(attention, "load_varlen_kernel", lambda: reference_varlen)
    q, k, v = inputs(4, kv_heads)
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
    torch.testing.assert_close(attention._attend_with_varlen(q, k, v, cu_seqlens, None, None), naive(q, k, v, BOUNDS))


@pytest.mark.parametrize("packed", [True, False])
def test_kernels_compute_the_same_values(packed: bool) -> None:
    q, k, v = inputs(4, 2)
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32) if packed else None
    results = {}
    for name in ("auto", "math", "flash"):
        with use_attention_kernel(name):
            context = Attention()(q, k, v, cu_seqlens)
            results[name] = [context, *torch.autograd.grad(context.square().sum(), (q, k, v))]
    for automatic, math_kernel, flash in zip(*results.values(), strict=True):
        torch.testing.assert_close(math_kernel, automatic, rtol=1e-10, atol=1e-12)
        assert torch.equal(flash, automatic), "a CPU has one fused kernel"


def test_the_kernel_of_an_attention_is_named_and_one_that_cannot_compute_it_is_refused() -> None:
    kernel_of = partial(
        attention.find_attention_kernel, head_dim=16, device=torch.device("cpu"), dtype=torch.float64, is_packed=True
    )
    assert [kernel_of(name) for name in ("auto", "flash", "math")] == ["flash", "flash", "math"]
    for name in ("cudnn", "efficient"):
        with pytest.raises(PlanError, match=f"kernel `{name}` cannot compute float64 heads of size 16 on cpu") as error:
            kernel_of(name)
        assert error.value.diagnostics[0].code == "attention-kernel"


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["auto", "cudnn", "flash", "efficient", "math"])
def test_every_kernel_on_cuda_equals_the_naive_form(name: str, packed: bool) -> None:
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16
    q, k, v = (torch.randn(BATCH, LENGTH, 4, 32, generator=generator) for _ in range(3))
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32).cuda() if packed else None
    chosen = attention.find_attention_kernel(name, 32, torch.device("cuda"), dtype, is_packed=packed)
    assert chosen == name or name == "auto"
    with use_attention_kernel(name):
        context = Attention()(*(tensor.to("cuda", dtype) for tensor in (q, k, v)), cu_seqlens)
    torch.testing.assert_close(context.float().cpu(), naive(q, k, v, BOUNDS if packed else [[0]] * BATCH), rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_cuda_equals_the_naive_form(dtype: torch.dtype, tolerance: float, kv_heads: int, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, LENGTH, heads, 32, generator=generator) for heads in (4, kv_heads, kv_heads))
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32).cuda() if packed else None
    ours = Attention()(*(tensor.to("cuda", dtype) for tensor in (q, k, v)), cu_seqlens)
    oracle = naive(q, k, v, BOUNDS if packed else [[0]] * BATCH)
    torch.testing.assert_close(ours.float().cpu(), oracle, rtol=tolerance, atol=tolerance)


class Counted:
    """`compute` that counts its calls."""

    def __init__(self, field: Tensor) -> None:
        self.field = weakref.ref(field)
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        field = self.field()
        assert field is not None
        return field * 2.0


def test_nothing_from_inference_mode_reaches_a_graph() -> None:
    field = torch.arange(3.0)
    with torch.inference_mode():
        assert once_per_field(field, "double", Counted(field)).is_inference()
        made_there = torch.arange(3)
        once_per_field(made_there, "double", Counted(made_there))
    assert not once_per_field(field, "double", Counted(field)).is_inference()
