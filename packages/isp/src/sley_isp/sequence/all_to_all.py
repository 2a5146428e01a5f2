"""`isp.all_to_all`: finds a model's attention and makes it work on slices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase

from torch import nn

from sley_core.api.comm import Group
from sley_core.api.model import Attention, ForwardPatch, Layer
from sley_core.errors import PlanError
from sley_core.protocols import SequenceCommunicator
from sley_isp.config import AllToAllConfig
from sley_isp.sequence.attention import SequenceAttention, over_slices
from sley_isp.sequence.mixing import check_apart


class AllToAllAttention(SequenceCommunicator):
    """Makes attention work on slices: in core's `Attention`, in `SequenceAttention`, and in modules that the plan names."""

    def __init__(self, config: AllToAllConfig, group: Group) -> None:
        self.patterns = config.modules
        self.apart: Sequence[str] = config.apart
        self.group = group
        self._undo = ExitStack()

    def attach(self, layers: Sequence[Layer]) -> None:
        """Patches every attention in `layers`, or none if it raises.

        Raises PlanError "sequence-attention" if a pattern matches no module, if there is no attention, and for an
        `nn.MultiheadAttention`, whose projections are inside it; "sequence-mixing" for other modules that look along a
        sequence.
        """
        with ExitStack() as undo:
            self._attach(layers, undo)
            self._undo = undo.pop_all()  # only if nothing was refused

    def _attach(self, layers: Sequence[Layer], undo: ExitStack) -> None:
        """Patches all attentions; `undo` then holds how to restore each, also if this raises."""
        unused = dict.fromkeys(self.patterns)
        changed: set[int] = set()
        inside: set[int] = set()
        for layer in layers:
            for name, module in layer.module.named_modules(prefix=layer.name):
                matching = [pattern for pattern in self.patterns if fnmatchcase(name, pattern)]
                for pattern in matching:
                    unused.pop(pattern, None)
                known = matching or isinstance(module, SequenceAttention | Attention)
                if not known or id(module) in changed | inside:
                    continue
                self._split(module, undo)
                changed.add(id(module))
                inside.update(id(part) for part in module.modules() if part is not module)
        _check_no_torch_attention(layers, inside)
        if self.group.size > 1:
            check_apart(layers, self.apart, inside)
        for pattern in unused:
            message = f"`modules` has the pattern `{pattern}`, which matches no module of the model"
            raise PlanError("sequence-attention", message, path=("sequence", "modules"), hint="see `train-cli show`")
        if not changed:
            raise PlanError(
                "sequence-attention",
                "the model has no attention that `isp.all_to_all` knows, so no position would see another slice",
                path=("sequence", "use"),
                hint="name its attention modules in `modules`, wrap them in sley_isp.sequence.attention."
                "SequenceAttention, or use sley_core.model.attention.Attention",
            )

    def _split(self, module: nn.Module, undo: ExitStack) -> None:
        """Makes `module` an attention over slices, until `undo` closes."""
        if isinstance(
            module, SequenceAttention
        ):  # gets the group instead of a patch, so that a subclass may have its own forward
            module.join(self.group)
            undo.callback(module.join, None)
        else:
            undo.callback(ForwardPatch(module, over_slices(module.forward, self.group)).undo)

    def detach(self) -> None:
        """Restores every attention."""
        self._undo.close()


def _check_no_torch_attention(layers: Sequence[Layer], inside: Collection[int]) -> None:
    """Raises PlanError for an `nn.MultiheadAttention` that is not `inside` an attention over slices (ids of modules)."""
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if isinstance(module, nn.MultiheadAttention) and id(module) not in inside:
                message = f"`{name}` is a torch.nn.MultiheadAttention, which would see one slice alone"
                hint = "project q, k and v in linears, and attend in a module of its own"
                raise PlanError("sequence-attention", message, path=("sequence", "use"), hint=hint)
