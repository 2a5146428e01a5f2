"""Tests the number of reductions, their buffers, and that no option changes a bit."""

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


def count_reductions(plans: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Returns the counters, the names of count_reductions weights, and the bytes of gradients and weights for each plan."""
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
    """Each gradient is reduced once per micro-batch or step, also that of a tied weight."""
    cases = [(reduce, tied) for reduce in ("micro_batch", "step") for tied in (False, True)]
    plans = [sharded(2, weights={"reduce": reduce}, model__tie_embeddings=tied, **BATCH) for reduce, tied in cases]
    for found in ranks(2)(count_reductions, plans, texts):
        for (reduce, tied), one in zip(cases, found, strict=True):
            assert one["reductions_per_step"] == (3 * 4 if reduce == "micro_batch" else 4 - tied)
            assert one["most_full_gradients"] == (2 * 7 if reduce == "micro_batch" else 2 * 7 + 2 - tied)
            assert (one["allocations_after_step_2"], one["lent"]) == (0, 0)
            assert one["gradients"] <= 1.2 * one["shards"], "a gradient of a shard's size each, and alignment"


def test_nothing_is_reduced_for_frozen_weights(ranks, sharded, texts):
    """These are frozen weights of adapters, and a frozen weight with a trainable bias."""
    trained = {"base": [], "down": ["weight"], "up": ["weight"], "shifted": ["bias"]}
    names = {f"block{at}.{name}.{one}" for at in (0, 1) for name, attributes in trained.items() for one in attributes}
    for (found,) in ranks(2)(count_reductions, [sharded(2, factory="adapted")], texts):
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
    """The bits equal those of the mode without overlap, on three ranks, whose sums have an order."""
    changes = {"precision__compute": "fp32", "batch": {"global_size": 6, "micro_size": 1}, "evaluation": None}
    plans = [sharded(3, weights=options, **changes) for options in VARIANTS]
    for reference, *others in ranks(3, 120)(all_recorded, plans, texts):
        for other in others:
            assert [row["loss"] for row in other.rows] == [row["loss"] for row in reference.rows]
            assert_same_bits(reference.weights, other.weights)


def uneven(plans: list[dict[str, Any]], folder: Path, fails: bool = False) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Returns losses and weights after steps of one, four and two micro-batches on each of two ranks. fails: before the
    last step, a step fails in its second forward, while gradients of the first micro-batch are in flight.
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


def test_steps_of_different_sizes_and_a_failed_step(ranks, sharded, texts):
    """No gradient includes terms of a failed or earlier step."""
    changes = {"factory": "mixed", "batch": {"global_size": 8, "micro_size": 1}}
    ((losses, reference),) = uneven([sharded(1, 1, **changes)], texts)
    plans = [sharded(2, weights=options, **changes) for options in ({}, {"reduce": "step"}, {"embedding": "hidden"})]
    for found in ranks(2)(uneven, plans, texts, fails=True):
        for found_losses, one in found:
            assert found_losses == pytest.approx(losses, rel=1e-10)
            assert_close_gradients(reference, one, 1e-10)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result of operations, except `known`."""

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
    """Many tokens share few rows. Sums have torch's order, without a second tensor of the table's size."""
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


def test_bf16_gradients_of_a_table_are_summed_in_fp32():
    """300 bf16 rows of ones add up to 300 in an fp32 buffer, but would not in bf16."""
    full = torch.empty(7, 2)
    write(nn.Embedding(7, 2), torch.full((300, 2), 1.0, dtype=torch.bfloat16), torch.full((300,), 5), full, False)
    assert full[5].tolist() == [300.0, 300.0]
    assert full.sum() == 600.0
