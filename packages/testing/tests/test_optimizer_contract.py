"""The contract of optimizers holds for all of torch.optim that can be stepped and for unusual ones, and says what is wrong with
others.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_core.optim.config import ELEMENTWISE, PER_MATRIX
from sley_testing.optimizer_contract import OptimizerContract

pytestmark = pytest.mark.usefixtures("parts")

OWN = "own_optimizers"


def table(factory: str, **more: Any) -> dict[str, Any]:
    return {"factory": factory, "lr": 0.05, **more}


def of(optimizer: dict[str, Any], **more: Any) -> type[OptimizerContract]:
    return type("TestOf", (OptimizerContract,), {"optimizer": optimizer, **more})


for name in sorted((ELEMENTWISE | PER_MATRIX) - {"Muon", "NAdam"}):
    globals()[f"Test{name}"] = pytest.mark.campaign(of(table(f"torch.optim:{name}")))


class TestNAdam(OptimizerContract):
    optimizer: ClassVar[dict[str, Any]] = table("torch.optim:NAdam")


@pytest.mark.campaign
class TestMuon(OptimizerContract):
    optimizer: ClassVar[dict[str, Any]] = table("torch.optim:Muon")
    only_matrices = True


@pytest.mark.campaign
class TestCore(OptimizerContract):
    optimizer: ClassVar[dict[str, Any]] = {"use": "core.adamw", "lr": 0.05}


for source in ("torch", "random", "own"):
    made = of(table(f"{OWN}:Draws", scope="elementwise", options={"source": source}))
    globals()[f"TestDraws{source.title()}"] = made if source == "own" else pytest.mark.campaign(made)

for name in ("AssignsData", "KeepsGradients", "Averages"):
    globals()[f"Test{name}"] = of(table(f"{OWN}:{name}", scope="elementwise"))

for name in ("LooksAtDims", "ManyKinds", "Within"):
    globals()[f"Test{name}"] = pytest.mark.campaign(of(table(f"{OWN}:{name}", scope="elementwise")))

for where in ("attribute", "option", "tensor", "state"):
    made = of(table(f"{OWN}:Counts", scope="elementwise", options={"where": where}))
    globals()[f"TestCounts{where.title()}"] = made if where == "state" else pytest.mark.campaign(made)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE | PER_MATRIX))
def test_nothing_is_wrong_with_those_of_torch(name: str) -> None:
    of(table(f"torch.optim:{name}"), only_matrices=name == "Muon")().test_optimizer_probe_passes()


@pytest.mark.parametrize("name", ["LooksAtDims", "ManyKinds", "Within"])
def test_nothing_is_wrong_with_what_a_run_makes_right(name: str) -> None:
    of(table(f"{OWN}:{name}", scope="elementwise"))().test_optimizer_probe_passes()


WRONG = [
    ("InnerOfItsOwn", "has another optimizer in `inner`.*no learning rate or checkpoint"),
    ("TensorsInAttribute", "grow with the parameters in the attribute `means`"),
    ("TensorsUnderOwnKey", "grow with the parameters in the state 'means'"),
    ("StatesOfCopies", "states of tensors that are no parameters"),
    ("LooksAtSizes", 'updates an element by more than its own gradients.*`?scope = "matrix"'),
    ("LooksAtAll", "cannot step its parameters one by one|updates a parameter by more than its own gradients"),
    ("Stacks", 'cannot step its parameters one by one.*scope = "global"'),
    ("KeepsItsRate", "takes no notice of the learning rate"),
    ("CountsById", "takes other steps once it goes on from a checkpoint"),
    ("Remembers", "takes other steps once it goes on from a checkpoint"),
    ("KeyOfTwoWords", "cannot go on from a checkpoint: .*'mean/square'"),
    ("ObjectInState", "cannot go on from a checkpoint: .*Identity is not plain data"),
    ("CannotStep", "cannot step two small parameters.*only sparse gradients"),
]


@pytest.mark.parametrize(("name", "words"), WRONG)
def test_what_is_wrong_is_said(name: str, words: str) -> None:
    wrong = of(table(f"{OWN}:{name}", scope="elementwise"))
    with pytest.raises(AssertionError, match=words):
        wrong().test_optimizer_probe_passes()


def test_a_gradient_of_none_is_allowed_for() -> None:
    with pytest.raises(AssertionError, match="whose `grad` is None cannot be updated"):
        of(table(f"{OWN}:NeedsAllGradients", scope="elementwise"))().test_parameter_without_gradient_is_unchanged()
