"""Gradients are reduced as often as the plan says, into shards, in few buffers; no option changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_isp.sharded_module import ShardedModule
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import record, running, weights

BATCH = {"batch": {"global_size": 12, "micro_size": 2}, "evaluation": {"every": 9, "steps": 1}}
"""Three micro-batches on each of two ranks."""


def reduced(plans: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """For each plan the counters, the names of the reduced weights, and the bytes of gradients and weights."""
    seen = []
    for tables in plans:
        with running(tables, folder) as run:
            communicator, names = run.stepper.executor.weights, set()
            add = communicator.reducer.add

            def spy(group: Any, param: Any, write: Any, names: Any = names, add: Callable[..., None] = add) -> None:
                names.add(param.name)
                add(group, param, write)

            communicator.reducer.add = spy
            for _ in range(3):
                run.step()
            numbers = {"names": names, "lent": communicator.pool.num_lent, "gradients": run.store.num_bytes}
            shards = sum(param.parameter.nbytes for param in run.registry)
            seen.append(communicator.counts() | numbers | {"shards": shards})
    return seen


def test_each_gradient_is_reduced_once(ranks, sharded, texts):
    """Once per micro-batch, or per step, in which a tied weight's is one of them."""
    cases = [(reduce, tied) for reduce in ("micro_batch", "step") for tied in (False, True)]
    plans = [sharded(2, weights={"reduce": reduce}, model__tie_embeddings=tied, **BATCH) for reduce, tied in cases]
    for found in ranks(2)(reduced, plans, texts):
        for (reduce, tied), one in zip(cases, found, strict=True):
            assert one["reductions_per_step"] == (3 * 4 if reduce == "micro_batch" else 4 - tied)
            assert one["most_full_gradients"] == (2 * 7 if reduce == "micro_batch" else 2 * 7 + 2 - tied)
            assert (one["allocations_after_step_2"], one["lent"]) == (0, 0)
            assert one["gradients"] <= 1.2 * one["shards"], "a gradient of a shard's size each, and alignment"


def test_nothing_is_reduced_for_frozen_weights(ranks, sharded, texts):
    """Neither for adapters' frozen bases, nor for a weight of which only the bias is trained."""
    trained = {"base": [], "down": ["weight"], "up": ["weight"], "shifted": ["bias"]}
    names = {f"block{at}.{name}.{one}" for at in (0, 1) for name, attributes in trained.items() for one in attributes}
    for (found,) in ranks(2)(reduced, [sharded(2, factory="adapted")], texts):
        assert found["names"] == {"embed.table.weight", "head.weight", "head.bias", *names}


VARIANTS: list[dict[str, Any]] = [
    {"overlap": False},
    {},
    {"unit": "module", "ahead": 3, "reductions": 1},
    {"ahead": 0},
    {"launch": "attention.output"},
]


def all_recorded(plans: list[dict[str, Any]], folder: Path) -> list[Any]:
    return [record(tables, 3, folder=folder) for tables in plans]


def test_no_option_changes_a_bit(ranks, sharded, texts):
    """The bits of the mode that waits for everything at once: fp32, three steps; three ranks, so sums have an order."""
    changes = {"precision__compute": "fp32", "batch": {"global_size": 6, "micro_size": 1}, "evaluation": None}
    plans = [sharded(3, weights=options, **changes) for options in VARIANTS]
    for reference, *others in ranks(3, 120)(all_recorded, plans, texts):
        for other in others:
            assert [row["loss"] for row in other.rows] == [row["loss"] for row in reference.rows]
            assert_same_bits(reference.weights, other.weights)


def uneven(plans: list[dict[str, Any]], folder: Path, fails: bool = False) -> list[tuple[list[float], dict[str, Tensor]]]:
    """For each plan: losses and weights after steps of one, four and two micro-batches on each of two ranks. fails: before the
    last step, one that fails in its second forward, when gradients of the first micro-batch are in flight.
    """
    found = []
    for tables in plans:
        with running(tables, folder) as run:
            dp, losses = run.groups["dp"], []
            for number, size in enumerate([2, 8, 4]):
                generator = torch.Generator().manual_seed(number)
                y = torch.randn(size, 4, 6, generator=generator, dtype=torch.float64)
                batch = {"tokens": torch.randint(11, (size, 4), generator=generator), "y": y}
                own = {name: value.chunk(dp.size)[dp.coord] for name, value in batch.items()}
                if fails and number == 2:
                    answers = iter([None, ValueError("the test's failing layer")])

                    def fail(module: Any, args: Any, answers: Any = answers) -> None:
                        if error := next(answers):
                            raise error

                    handle = run.layers[-1].module.register_forward_pre_hook(fail)
                    with pytest.raises(ValueError, match="the test's failing layer"):
                        run.step(own)
                    handle.remove()
                losses.append(run.step(own)["loss"])
            found.append((losses, weights(run)))
    return found


def test_steps_of_other_sizes_and_one_that_fails(ranks, sharded, texts):
    """Nothing of a failed step, and nothing of a step before, is in another step's gradients."""
    changes = {"factory": "mixed", "batch": {"global_size": 8, "micro_size": 1}}
    ((losses, reference),) = uneven([sharded(1, 1, **changes)], texts)
    plans = [sharded(2, weights=options, **changes) for options in ({}, {"reduce": "step"}, {"embedding": "hidden"})]
    for found in ranks(2)(uneven, plans, texts, fails=True):
        for found_losses, one in found:
            assert found_losses == pytest.approx(losses, rel=1e-10)
            assert_close_gradients(reference, one, 1e-10)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that operations return, but for `known`."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known = known
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result is not self.known:
            self.numel = max(self.numel, result.numel())
        return result


def write(module: nn.Module, rows: Tensor, tokens: Tensor, full: Tensor, adds: bool) -> None:
    ShardedModule.write_gradient(SimpleNamespace(module=module), None, rows, tokens, full, adds)  # type: ignore[arg-type]


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_table(dtype, padding):
    """Many tokens of few rows, so that sums have an order: torch's, without a second tensor of the table's size."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(11, (40,), generator=generator)
    rows = torch.randn(40, 4, generator=generator, dtype=torch.float64).to(dtype)
    before = rows.clone()
    table = nn.Embedding(300, 4, padding_idx=padding)
    expected = torch.ops.aten.embedding_dense_backward(rows, tokens, 300, -1 if padding is None else padding, False)
    full = torch.full((300, 4), torch.nan, dtype=dtype)
    with Largest(full) as largest:
        write(table, rows, tokens, full, False)
        assert torch.equal(full, expected)
        write(table, rows, tokens, full, True)
    torch.testing.assert_close(full, 2 * expected)
    assert torch.equal(rows, before), "the output's gradient is autograd's"
    assert largest.numel <= max(rows.numel(), 300)


def test_the_gradient_of_a_table_in_half_is_summed_in_full():
    """bf16 rows of tokens into an fp32 buffer: 300 ones are 300, which bf16 cannot count to."""
    full = torch.empty(7, 2)
    write(nn.Embedding(7, 2), torch.full((300, 2), 1.0, dtype=torch.bfloat16), torch.full((300,), 5), full, False)
    assert full[5].tolist() == [300.0, 300.0]
    assert full.sum() == 600.0
