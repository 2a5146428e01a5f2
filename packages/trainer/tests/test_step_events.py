"""When the events of a step are called, and that stepping in buckets is the same update."""

from typing import Any

import pytest
import torch
from torch import nn

from sley_core.errors import RunError
from sley_testing.parity import assert_same_bits
from sley_testing.plans import small_plan
from sley_testing.runs import running, weights
from sley_trainer.update import step_buckets

GROUPS = {"use": "core.adamw", "lr": 3e-3, "groups": [{"match": "blocks.0.*", "lr": 1e-3, "weight_decay": 0.1}]}


def test_events_come_in_their_order(texts):
    """The last also after a step that is not taken."""
    with running(small_plan(), texts) as run:
        seen: list[str] = []
        events = run.parts.events
        events.began.append(lambda: seen.append("began"))
        events.after_update.append(lambda: seen.append("after update"))
        run.store.on_ready.append(lambda param: seen.append("ready"))
        run.step()
        assert seen == ["began", *(["ready"] * len(run.store.params)), "after update"]
        seen.clear()
        batch = {name: torch.stack([run.dataset[0][name]] * 8) for name in run.dataset[0]}
        batch["labels"] = torch.full_like(batch["labels"], -100)
        with pytest.raises(RunError, match="nothing-counts"):
            run.step(batch)
        assert [name for name in seen if name != "ready"] == ["began", "after update"]


def trained(texts, buckets, **changes):
    with running(small_plan(**changes), texts) as run:
        run.parts.events.step_in_buckets = buckets
        rows = [run.step() for _ in range(4)]
        return [row["grad_norm"] for row in rows], weights(run)


def one_by_one(params):
    for one in reversed(params):
        yield [one]


def by_threes(params):
    yield from (params[at : at + 3] for at in range(0, len(params), 3))


@pytest.mark.sample(2)
@pytest.mark.parametrize("buckets", [one_by_one, by_threes])
@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_buckets_give_the_bits_of_one_step(buckets, compute, texts):
    """Whatever the buckets and the groups of options."""
    plain = trained(texts, None, optimizer=GROUPS, precision__compute=compute)
    found = trained(texts, buckets, optimizer=GROUPS, precision__compute=compute)
    assert plain[0] == found[0]
    assert_same_bits(plain[1], found[1])


class Counting(torch.optim.SGD):
    """Divides its steps by their number, which it keeps in one of several places."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, lr=0.1)
        self.where, self.count = where, 0

    def step(self, closure: Any = None) -> Any:
        self.count += self.where == "attribute"
        if self.where == "state":
            self.state.setdefault("all", {"count": torch.zeros(())})["count"] += 1
        for group in self.param_groups:
            first = torch.zeros(()) if self.where == "tensor" else 0
            group["count"] = group.get("count", first) + (self.where in ("option", "tensor"))
            total = sum(float(one.detach().sum()) for one in group["params"]) if self.where == "sum" else 0.0
            group["sum"] = group.get("sum", 0.0) + total
            number = self.count + group["count"] + float(self.state.get("all", {}).get("count", 0)) + group["sum"]
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1 / float(number))
        return None


class One:
    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(2))
        self.parameter.grad = torch.full((2,), 0.5)


@pytest.mark.parametrize("where", ["attribute", "option", "tensor", "state"])
def test_an_optimizer_that_counts_steps_counts_them_once(where):
    found = []
    for is_whole in (True, False):
        params: list[Any] = [One() for _ in range(3)]
        optimizer = Counting([one.parameter for one in params], where)
        for _ in range(3):
            optimizer.step() if is_whole else step_buckets(optimizer, params, one_by_one, optimizer.step)
        found.append([one.parameter.tolist() for one in params])
    assert found[0] == found[1]


def test_an_optimizer_whose_number_depends_on_what_it_steps_is_refused():
    """It is not that of one step; the groups are whole again."""
    params: list[Any] = [One(), One()]
    params[0].parameter.data.mul_(2)
    optimizer = Counting([one.parameter for one in params], "sum")
    with pytest.raises(RunError, match=r"optimizer-counts-steps.*Counting computes its option 'sum'"):
        step_buckets(optimizer, params, one_by_one, optimizer.step)
    assert len(optimizer.param_groups[0]["params"]) == 2


class Splitting(torch.optim.SGD):
    """Gives a parameter its own group in the first step that has it."""

    def step(self, closure: Any = None) -> Any:
        if len(self.param_groups) == 1 and (parameters := self.param_groups[0]["params"]):
            self.param_groups.append({**self.param_groups[0], "params": [parameters.pop()]})
        return super().step(closure)


def test_an_optimizer_that_makes_groups_within_a_step_is_refused():
    params: list[Any] = [One()]
    optimizer = Splitting([params[0].parameter], lr=0.1)
    with pytest.raises(RunError, match=r"optimizer-groups.*Splitting changes its groups within a step"):
        step_buckets(optimizer, params, one_by_one, optimizer.step)
