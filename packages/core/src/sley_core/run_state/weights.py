"""The weights in a checkpoint, and the plan of its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from sley_core.optim.shared import in_training
from sley_core.plan.loader import Loader
from sley_core.plan.read import read_text
from sley_core.plan.resolve import resolve
from sley_core.run_files import with_kept
from sley_core.run_state.restore import extra_states, load_one
from sley_core.run_state.tensors import BUFFERS, WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.plan.plan import Plan
    from sley_core.run_state.saved import Saved
    from sley_core.weight_files.read import TensorKind


class SavedWeights:
    """The weights of `found` by names of the book, and the buffers beside them: masters, where there were any. If the optimizer
    of its `plan` has modes, they are those after `eval()`.
    """

    def __init__(self, found: Saved, plan: Plan) -> None:
        self.found = found
        self._plan = plan
        self._origin = extra_states(found) | {
            name.removeprefix(kind): name
            for kind in (WEIGHTS, BUFFERS)
            for name in found.names
            if name.startswith(kind)
        }

    @property
    def names(self) -> Sequence[str]:
        return list(self._origin)

    def kind(self, name: str) -> TensorKind:
        return self.found.kind(self._origin[name])

    def tensor(self, name: str) -> Tensor:
        value = self.found.tensor(self._origin[name])
        if not self.found.about.state["has_modes"] or not self._origin[name].startswith(WEIGHTS):
            return value
        parameter = nn.Parameter(value)
        config: Any = self._plan.optimizer.config
        group = {"params": [parameter], "lr": config.lr, "initial_lr": config.lr, "weight_decay": config.weight_decay}
        optimizer: Any = in_training(self._plan.optimizer.build([group], parameter.device))
        load_one(optimizer, self.found, name)
        optimizer.eval()
        return parameter.detach()


def plan_and_weights(found: Saved) -> tuple[Plan, SavedWeights]:
    """Returns the resolved plan of the run that wrote the checkpoint `found`, and its weights.

    The plan names the folder from which its paths start; files that the run has kept take the
    place of those that it names, if the checkpoint lies in the run's folder.
    """
    document = read_text(found.about.plan, found.place, Path())
    plan = resolve(with_kept(document, Path(found.place).parent.parent), Loader())
    return plan, SavedWeights(found, plan)
