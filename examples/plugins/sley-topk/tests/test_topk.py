"""`topk.reducer` holds the contract of gradient handlers; what it leaves out comes later, and goes through checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan, plan_from_dict
from sley_testing.checkpointer_contract import assert_same_stretch, stretch
from sley_testing.contract import GradientHandlerContract, observe, tables
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_parity, gradients, record


def two_ranks(ratio: float, **changes: Any) -> dict[str, Any]:
    """The small plan on two ranks; all gradients travel in part."""
    handlers = [{"use": "topk.reducer", "ratio": ratio, "min_numel": 0}]
    return small_plan(parallel={"dp": 2}, gradient_handlers=handlers, **changes)


class TestTopK(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "topk.reducer", "ratio": 0.5, "min_numel": 0}


def test_with_all_elements_runs_have_the_numbers_of_one_process(ranks: Callable[..., Any], texts: Path) -> None:
    assert_parity(record(small_plan(), 3, folder=texts), ranks(2)(record, two_ranks(1.0), 3, folder=texts), "fp64")


def test_two_ranks_send_few_elements_of_each(ranks: Callable[..., Any]) -> None:
    """Of 36 elements a tenth is four, of each rank; where both sent one, their places are the same."""
    table = {"use": "topk.reducer", "ratio": 0.1, "min_numel": 36}
    exact, _ = ranks(2)(observe, [{"use": "core.each"}], 1, False)
    found, _ = ranks(2)(observe, [table], 1, False)
    weights, biases = "second.often.weight", "second.often.bias"
    assert 4 <= found.gradients[0][weights].count_nonzero() <= 8
    assert found.gradients[0][biases].equal(exact.gradients[0][biases])


def summed_and_kept(handlers: list[dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Runs on each rank: the sum of each gradient over four steps of the contract's model, and what is kept then."""
    sums: dict[str, Tensor] = {}
    with World.join("cpu") as world, assemble(plan_from_dict(tables(handlers, 1)), world) as run:
        for _ in range(4):
            run.step()
            sums = {name: sums.get(name, 0.0) + value for name, value in gradients(run).items()}
        (handler,) = run.stepper.handlers
        return sums, {name: value.clone() for name, value in getattr(handler, "saved_state", dict)().items()}


def test_nothing_is_lost(ranks: Callable[..., Any]) -> None:
    """What was given over four steps and what ranks still keep make up all gradients; the learning rate is tiny."""
    exact, _ = ranks(2)(summed_and_kept, [{"use": "core.each"}])
    found = ranks(2)(summed_and_kept, [{"use": "topk.reducer", "ratio": 0.1, "min_numel": 0}])
    given = found[0][0]
    for name, due in exact[0].items():
        left_out = sum(kept[name] for _, kept in found).view_as(due)
        assert torch.allclose(given[name] + left_out, due, atol=1e-4 * float(due.abs().max()) + 1e-12), name
    name = "second.often.weight"
    assert (given[name] - exact[0][name]).norm() > 0.1 * exact[0][name].norm()


def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_bits(ranks: Callable[..., Any], texts: Path, tmp_path: Path) -> None:
    """With what was left out; without it the next sums are others."""
    tables, path = two_ranks(0.1), tmp_path / "saved"
    undisturbed = ranks(2)(stretch, tables, 4, folder=texts)
    ranks(2)(stretch, tables, 2, folder=texts, save=path)
    resumed = ranks(2)(stretch, tables, 2, folder=texts, load=path)
    assert not any(one.notes for one in resumed)
    assert_same_stretch(undisturbed, resumed)


def sent_and_kept(tables: dict[str, Any], folder: Path) -> tuple[float, int]:
    """Runs on each rank: bytes sent in a step, and the elements kept."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        (handler,) = run.stepper.handlers
        kept = sum(error.numel() for error in handler.saved_state().values())
        return run.counts["topk.reducer"]["sent_bytes_per_step"], kept


def test_it_counts_what_it_sends_and_keeps_an_error_for_each_element(ranks: Callable[..., Any], texts: Path) -> None:
    few, many = (ranks(2)(sent_and_kept, two_ranks(ratio), texts) for ratio in (0.1, 1.0))
    for (sent, kept), (all_sent, _) in zip(few, many, strict=True):
        assert 0.1 <= sent / all_sent < 0.12  # a gradient sends one element at least
        assert kept == sum(param.numel for param in assembled(texts).registry)


def assembled(texts: Path) -> Any:
    """The small plan's run, which has taken no step."""
    with assemble(plan_from_dict(small_plan(), texts), World.alone("cpu")) as run:
        return run


def test_fp16_is_refused(texts: Path) -> None:
    problems = check_plan(plan_from_dict(changed(two_ranks(0.1), precision={"compute": "fp16"}), texts), 2)
    assert [problem.code for problem in problems] == ["handler-precision"]


@pytest.mark.parametrize("ratio", [0.0, 1.5, -0.1])
def test_a_share_is_a_share(ratio: float) -> None:
    with pytest.raises(Exception, match="ratio"):
        plan_from_dict(two_ranks(ratio))


def test_the_plan_of_this_package_is_valid() -> None:
    plan = load_plan(Path(__file__).parents[1] / "plan.toml")
    assert list(check_plan(plan, plan.world())) == []
