"""Tests that `topk.reducer` passes the contract of gradient handlers, and sends omitted elements later, also after a resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.contract import GradientHandlerContract, handler_plan, observe
from sley_testing.plans import changed, small_plan
from sley_testing.runs import RunRecord, assert_parity, assert_same_run, gradients, record, running


def two_rank_plan(ratio: float, **changes: Any) -> dict[str, Any]:
    """Returns the small plan on two ranks with sparse sums of all gradients."""
    handlers = [{"use": "topk.reducer", "ratio": ratio, "min_numel": 0}]
    return small_plan(parallel={"dp": 2}, gradient_handlers=handlers, **changes)


@pytest.mark.campaign
class TestTopK(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "topk.reducer", "ratio": 0.5, "min_numel": 0}


def test_full_ratio_matches_one_process(ranks: Callable[..., Any], texts: Path) -> None:
    assert_parity(record(small_plan(), 2, folder=texts), ranks(2)(record, two_rank_plan(1.0), 2, folder=texts), "fp64")


def test_ranks_send_largest_elements(ranks: Callable[..., Any]) -> None:
    """Each rank sends four of 36 elements, at equal or different positions."""
    table = {"use": "topk.reducer", "ratio": 0.1, "min_numel": 36}
    (exact, sparse), _ = ranks(2)(observe_each, [{"use": "core.each"}, table])
    weights, biases = "second.often.weight", "second.often.bias"
    assert 4 <= sparse.gradients[0][weights].count_nonzero() <= 8
    assert sparse.gradients[0][biases].equal(exact.gradients[0][biases])


def observe_each(handlers: list[dict[str, Any]]) -> list[RunRecord]:
    return [observe([table], 1, False) for table in handlers]


def sums_and_errors(table: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the sum of each gradient over four steps of the contract's model, and the errors of this rank."""
    sums: dict[str, Tensor] = {}
    with running(handler_plan([table], 1)) as run:
        for _ in range(4):
            run.step()
            sums = {name: sums.get(name, 0.0) + value for name, value in gradients(run).items()}
        (handler,) = run.stepper.handlers
        return sums, {name: value.clone() for name, value in getattr(handler, "saved_state", dict)().items()}


def exact_and_sparse_sums() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [sums_and_errors({"use": "core.each"}), sums_and_errors({"use": "topk.reducer", "ratio": 0.1, "min_numel": 0})]


def test_sums_and_errors_add_up(ranks: Callable[..., Any]) -> None:
    """Expects that computed sums plus errors equal the exact sums. The learning rate is tiny."""
    ((exact, _), first), (_, second) = ranks(2)(exact_and_sparse_sums)
    summed = first[0]
    for name, expected in exact.items():
        missing = sum(errors[name] for _, errors in (first, second)).view_as(expected)
        assert torch.allclose(summed[name] + missing, expected, atol=1e-4 * float(expected.abs().max()) + 1e-12), name
    name = "second.often.weight"
    assert (summed[name] - exact[name]).norm() > 0.1 * exact[name].norm()


def run_and_resume(tables: dict[str, Any], folder: Path, path: Path) -> tuple[Any, Any]:
    """Returns an uninterrupted run and a run that was resumed after two steps."""
    whole = record(tables, 4, folder=folder)
    record(tables, 2, folder=folder, save=path)
    return whole, record(tables, 2, folder=folder, load=path)


def test_resumed_run_is_bit_identical(ranks: Callable[..., Any], texts: Path, tmp_path: Path) -> None:
    """The errors are part of the checkpoint."""
    results = ranks(2)(run_and_resume, two_rank_plan(0.1), texts, tmp_path / "saved")
    assert not any(resumed.notes for _, resumed in results)
    for whole, resumed in results:
        assert_same_run(whole, resumed)


def sent_bytes(plans: list[dict[str, Any]], folder: Path) -> list[float]:
    """Returns the bytes of a step of each plan."""
    results = []
    for plan in plans:
        with running(plan, folder) as run:
            run.step()
            results.append(run.counts["topk.reducer"]["sent_bytes_per_step"])
    return results


def test_a_tenth_of_the_elements_is_sent(ranks: Callable[..., Any], texts: Path) -> None:
    for sent, all_sent in ranks(2)(sent_bytes, [two_rank_plan(0.1), two_rank_plan(1.0)], texts):
        assert 0.1 <= sent / all_sent < 0.12  # a gradient sends one element at least


def test_fp16_is_refused(texts: Path) -> None:
    problems = check_plan(plan_from_dict(changed(two_rank_plan(0.1), precision={"compute": "fp16"}), texts), 2)
    assert [problem.code for problem in problems] == ["handler-precision"]
