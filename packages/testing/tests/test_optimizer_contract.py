"""Tests the optimizer contract with torch.optim, unusual correct optimizers, and optimizers with one bug each."""

from typing import Any

import pytest

from sley_core.optim.config import ELEMENTWISE, PER_MATRIX
from sley_testing.optimizer_contract import OptimizerContract

pytestmark = pytest.mark.usefixtures("parts")

TORCH_OPTIMIZERS = sorted(ELEMENTWISE | PER_MATRIX)


def contract_of(factory: str, *, only_matrices: bool = False, **table: Any) -> type[OptimizerContract]:
    """Returns the contract of the optimizer `factory` of `torch.optim` or `own_optimizers`."""
    module = "torch.optim" if factory in TORCH_OPTIMIZERS else "own_optimizers"
    optimizer = {"factory": f"{module}:{factory}", "lr": 0.05, **table}
    return type("TestOptimizer", (OptimizerContract,), {"optimizer": optimizer, "only_matrices": only_matrices})


UNUSUAL_OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("AssignsData", "KeepsGradients", "Averages", "ManyKinds")},
    **{f"Draws_{source}": {"options": {"source": source}} for source in ("own", "torch", "random")},
    **{f"Counts_{place}": {"options": {"place": place}} for place in ("state", "attribute", "option", "tensor")},
}
for name, table in UNUSUAL_OPTIMIZERS.items():
    contract = contract_of(name.partition("_")[0], scope="elementwise", **table)
    globals()[f"Test{name}"] = contract if name == "Averages" else pytest.mark.campaign(contract)
for name in TORCH_OPTIMIZERS:
    contract = contract_of(name, only_matrices=name == "Muon")
    globals()[f"Test{name}"] = pytest.mark.campaign(contract)


@pytest.mark.parametrize("name", ["Adafactor", "Adagrad", "Muon", "NAdam", "RMSprop"])  # the contracts above probe all
def test_probe_accepts_torch_optimizers(name: str) -> None:
    contract_of(name, only_matrices=name == "Muon")().test_optimizer_probe_passes()


@pytest.mark.parametrize("name", ["AssignsData", "KeepsGradients", "ManyKinds", "Counts"])
def test_unusual_optimizers_match_plain_loop(name: str) -> None:
    contract = contract_of(name, scope="elementwise")()
    contract.test_optimizer_probe_passes()
    contract.test_run_matches_plain_loop("bf16")


PROBE = "test_optimizer_probe_passes"
BUGS = [
    ("TensorsInAttribute", PROBE, "takes different steps after it resumes from a checkpoint"),
    ("TensorsUnderOwnKey", PROBE, "cannot resume from a checkpoint: .*the state 'means'"),
    ("LooksAtSizes", PROBE, 'does not update each element from its own gradient alone.*`?scope = "matrix"'),
    (
        "LooksAtAll",
        PROBE,
        "cannot update its parameters one by one|does not update each parameter from its own gradients alone",
    ),
    ("KeepsItsRate", PROBE, "ignores the learning rate"),
    ("CannotStep", PROBE, "cannot step two small parameters.*only sparse gradients"),
    ("NeedsAllGradients", "test_parameter_without_gradient_is_unchanged", "whose `grad` is None cannot be updated"),
]


@pytest.mark.parametrize(("name", "test", "message"), BUGS)
def test_bug_is_reported(name: str, test: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        getattr(contract_of(name, scope="elementwise")(), test)()
