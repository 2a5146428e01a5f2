"""What the engine refuses in the same words on all ranks: facts that differ, names of numbers, and sums without an order."""

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


def agree(groups: Groups, numel: int = 2, **fields: torch.Tensor) -> None:
    """Checks a step of one parameter, in a buffer of `numel` elements, and of a batch with `fields`."""
    store: Any = SimpleNamespace(num_layouts=1, registry=[], params=[SimpleNamespace(name="w")])
    store.reduction, store.buffers = Reduction(groups, StepState()), [SimpleNamespace(data=torch.zeros(numel))]
    RankAgreement(groups, store).begin("step 1", StepBatch([], [fields], [1.0])).check()


def be_refused() -> str:
    """Returns the message about exchanges that differ."""
    with World.join("cpu") as world:
        groups, rank = world.make_groups(Topology.from_sizes(2, sp=2), 30), world.rank
        numbers = StepNumbers(groups)
        numbers.add("my/norm", float, "root" if rank else "sum")
        calls: dict[str, Any] = {
            "ranks-differ.*1 received the batch field x float32.3., but": lambda: agree(groups, x=torch.zeros(4 - rank)),
            "ranks-differ.*rank 1 and rank 0 received different samples": lambda: agree(groups, x=torch.full((9,), rank)),
            "ranks-differ.*rank 1 and rank 0 reduce their gradients": lambda: agree(groups, 2 + rank),
            "number-name.*'my/norm' is there already": lambda: numbers.add("my/norm", float),
            "number-name.*'norm' has no slash": lambda: numbers.add("norm", float),
            "number-name.*'my/norm' is a plain sum on one rank, but": numbers.gather_names,
            "number-late": lambda: numbers.add("my/late", float),
            r"outputs-apart.*\[2\] lacks the 4 positions .* dim 1": lambda: gather_output(torch.zeros(2), (1, 4), groups["sp"]),
        }
        for says, call in calls.items():
            with pytest.raises(RunError, match=says):
                call()
        exchanges = {axis: ExchangeSummary((0, 1), number, number, "w") for axis, number in (("sp", 2), ("stage", rank))}
        return str(exchange_mismatch_error("step 3", exchanges, groups["control"]))


def test_ranks_that_do_not_agree_are_told_alike(ranks: Any) -> None:
    said = "error[ranks-differ]: step 3: in stage, rank 1 ran 1 collectives, the last of them w, but rank 0 ran none\nhint: "
    assert all(message.startswith(said) for message in ranks(2, init=False)(be_refused))
    with World.alone("cpu") as world, pytest.raises(RunError, match="own-code"):
        RankAgreement(world.make_groups(Topology.from_sizes(1), 30)).begin("step 1", refusal=RunError("own-code", "no")).check()


def test_sums_without_an_order_are_refused() -> None:
    stages = [(stage, [Layer(f"l{stage}", nn.Linear(2, 2))]) for stage in range(3)]
    for _, (layer,) in stages:
        layer.module.weight = stages[0][1][0].module.weight
    CanonicalReduction.check_model(stages[:2], [])
    with pytest.raises(PlanError, match=r"canonical-buffers.* its own \*.running_mean from its own samples"):
        CanonicalReduction.check_model(stages[:2], ["*.running_mean"])
    with pytest.raises(PlanError, match=r"canonical-tie.* 3 layers on several stages share 'l0.weight'"):
        CanonicalReduction.check_model(stages, [])
