"""The weights in a checkpoint, and the plan of its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from sley_core.checkpoint.index import BUFFERS, INDEX, WEIGHTS
from sley_core.checkpoint.reader import Checkpoint, read
from sley_core.checkpoint.restore import extra_states, load_one
from sley_core.checkpoint.verify import newest, ready, verify
from sley_core.errors import RunError
from sley_core.files.folders import open_folder
from sley_core.optim.shared import in_training
from sley_core.plan.loader import Loader
from sley_core.plan.read import read_text
from sley_core.plan.resolve import resolve
from sley_core.run_files import with_kept
from sley_core.weight_files.read import TensorKind

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.plan.plan import Plan


class CheckpointWeights:
    """The weights of `found` by names of the book, and the buffers beside them: masters, where there were any. If the optimizer
    of its `plan` has modes, they are those after `eval()`.
    """

    def __init__(self, found: Checkpoint, plan: Plan) -> None:
        self.found = found
        self._plan = plan
        self._origin = extra_states(found) | {
            name.removeprefix(kind): name for kind in (WEIGHTS, BUFFERS) for name in found if name.startswith(kind)
        }

    @property
    def names(self) -> Sequence[str]:
        return list(self._origin)

    def kind(self, name: str) -> TensorKind:
        facts = self.found.facts(self._origin[name])
        return TensorKind(facts.dtype, facts.shape)

    def tensor(self, name: str) -> Tensor:
        value = self.found[self._origin[name]]
        if not self.found.index.state["has_modes"] or not self._origin[name].startswith(WEIGHTS):
            return value
        parameter = nn.Parameter(value)
        config: Any = self._plan.optimizer.config
        group = {"params": [parameter], "lr": config.lr, "initial_lr": config.lr, "weight_decay": config.weight_decay}
        optimizer: Any = in_training(self._plan.optimizer.build([group], parameter.device))
        load_one(optimizer, self.found, name)
        optimizer.eval()
        return parameter.detach()


def weights_of_checkpoint(path: str) -> tuple[Plan, CheckpointWeights] | None:
    """Returns the resolved plan of the run that wrote the checkpoint at `path`, and its weights; of a folder of several, those
    of the newest whole one. None for a folder that has none.

    Reads all of it once, and raises RunError "checkpoint-damaged" if it is not as it was written.
    """
    folder = open_folder(path)
    if INDEX not in folder.names():
        if not ready(folder):
            return None
        seen = newest(path)
        if seen.path is None:
            raise RunError(
                "checkpoint-damaged", f"no checkpoint in {folder.text} is whole: {seen.passed_over[0][1][0]}"
            )
        path = seen.path
    elif found := verify(path):
        raise RunError("checkpoint-damaged", f"the checkpoint {folder.text} is damaged: {', '.join(map(str, found))}")
    checkpoint = read(path)
    # Its plan names the folder that its paths start at.
    document = read_text(checkpoint.index.plan, f"{checkpoint.folder.text}/{INDEX}", Path())
    plan = resolve(with_kept(document, Path(checkpoint.folder.text).parent.parent), Loader())
    return plan, CheckpointWeights(checkpoint, plan)
