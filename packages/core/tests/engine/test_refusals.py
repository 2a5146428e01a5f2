"""What the engine refuses, with the same words on all ranks: facts on which ranks differ, ties without an order, numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sley_core.comm.exchanges import ExchangeSummary
from sley_core.comm.world import Groups, World
from sley_core.engine.agreement import RankAgreement, exchange_mismatch_error
from sley_core.engine.canonical import CanonicalReduction
from sley_core.engine.parts import StepNumbers, StepState
from sley_core.engine.reduction import Reduction
from sley_core.engine.step_batch import StepBatch, gather_output
from sley_core.errors import PlanError, RunError
from sley_core.model.layers import Layer
from sley_core.topology import Topology


def begin(groups: Groups, numel: int = 2, **fields: torch.Tensor) -> None:
    """Checks a step of one parameter, in a buffer of `numel` elements, and of a batch with `fields`."""
    buffer, reduction = SimpleNamespace(data=torch.zeros(numel)), Reduction(groups, StepState())
    store: Any = SimpleNamespace(
        reduction=reduction, num_layouts=1, params=[SimpleNamespace(name="w")], buffers=[buffer], registry=[]
    )
    RankAgreement(groups, store).begin("step 1", StepBatch([], [fields], [1.0])).check()


def raise_mismatch(groups: Groups, rank: int) -> None:
    exchanges = {"stage[0, 1]": ExchangeSummary((0, 1), rank, rank, "w"), "sp[0, 1]": ExchangeSummary((0, 1), 2, 2, "h")}
    raise exchange_mismatch_error("step 3", exchanges, groups["control"])


def name_twice(groups: Groups, rank: int) -> None:
    numbers = StepNumbers(groups)
    numbers.add("mine/norm", float, "root" if rank else "sum")
    for name, reason in (("mine/norm", "number-name.* is there already"), ("norm", "number-name.* has no slash")):
        with pytest.raises(RunError, match=reason):
            numbers.add(name, float)
    try:
        numbers.gather_names()
    finally:
        with pytest.raises(RunError, match="number-late"):
            numbers.add("mine/late", float)


CALLS: dict[str, Any] = {
    "ranks-differ.* rank 1 received the batch field x .*2, 4., but rank 0 received x float32.2, 3.": (
        lambda groups, rank: begin(groups, x=torch.zeros(2, 3 + rank))
    ),
    "ranks-differ.* rank 1 and rank 0 received different samples": lambda groups, rank: begin(groups, x=torch.full((9,), rank)),
    "ranks-differ.* rank 1 and rank 0 reduce their gradients in .* different buffers": lambda groups, rank: begin(
        groups, 2 + rank
    ),
    r"ranks-differ.* step 3: in stage\[0, 1\], rank 1 ran 1 collectives, the last of them w, but rank 0 ran none": raise_mismatch,
    "number-name.*'mine/norm' is a plain sum on one rank, but the root": name_twice,
    r"outputs-apart.* an output of shape \[2\] lacks the 4 positions of its slice along dim 1": (
        lambda groups, rank: gather_output(torch.zeros(2), (1, 4), groups["sp"])
    ),
}


def check_all_calls() -> None:
    with World.join("cpu") as world:
        groups = world.make_groups(Topology.from_sizes(2, sp=2), 30)
        for says, call in CALLS.items():
            with pytest.raises(RunError, match=says):
                call(groups, world.rank)


def test_ranks_that_do_not_agree_are_told_alike(ranks: Any) -> None:
    ranks(2, init=False)(check_all_calls)


def test_a_refusal_of_the_only_rank_is_raised_by_the_check() -> None:
    with World.alone("cpu") as world, pytest.raises(RunError, match="own-code"):
        RankAgreement(world.make_groups(Topology.from_sizes(1), 30)).begin("step 1", refusal=RunError("own-code", "no")).check()


def tied(count: int) -> list[tuple[int, list[Layer]]]:
    """The stages of one linear layer each, all with one weight."""
    linears = [nn.Linear(2, 2) for _ in range(count)]
    for linear in linears:
        linear.weight = linears[0].weight
    return [(stage, [Layer(f"l{stage}", linear)]) for stage, linear in enumerate(linears)]


@pytest.mark.parametrize(
    ("num_stages", "buffers", "says"),
    [
        (2, ["*.running_mean"], r"canonical-buffers.* its own \*.running_mean from its own samples"),
        (3, [], "canonical-tie.* 3 layers on several stages share 'l0.weight'"),
    ],
)
def test_sums_without_an_order_are_refused(num_stages: int, buffers: list[str], says: str) -> None:
    CanonicalReduction.check_model(tied(2), [])
    with pytest.raises(PlanError, match=says):
        CanonicalReduction.check_model(tied(num_stages), buffers)
