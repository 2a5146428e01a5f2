"""Finds torch modules, other than attention, that look along a sequence: on each rank they would see only one slice.

They are recognised by their class. A forward that uses `roll`, `cumsum` or a mean over positions is found in the first step,
when layers are asked (`sley_core.engine.positions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from sley_core.api.model import Layer
from sley_core.errors import Diagnostic, PlanError


def check_apart(layers: Sequence[Layer], apart: Sequence[str], inside: Collection[int]) -> None:
    """Raises PlanError "sequence-mixing" for each such module that no pattern of `apart` matches, and for each unused pattern.

    inside: ids of modules within an attention, which sees full sequences.
    """
    found = [(name, module) for name, module in _mixing(layers) if id(module) not in inside]
    wrong = [_mixes(name, module) for name, module in found if not any(fnmatchcase(name, one) for one in apart)]
    names = [*(name for name, _ in found), *(layer.name for layer in layers)]
    wrong += [_unused(one) for one in apart if not any(fnmatchcase(name, one) for name in names)]
    if wrong:
        raise PlanError.many(wrong)


def _mixing(layers: Sequence[Layer]) -> Iterator[tuple[str, nn.Module]]:
    """Yields name and module of each recurrent layer, each norm and pooling over positions, and each convolution with
    overlapping windows.
    """
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if isinstance(module, _MIXING) or (isinstance(module, nn.Conv1d | nn.ConvTranspose1d) and _overlaps(module)):
                yield name, module


_MIXING = (
    *(nn.RNNBase, nn.BatchNorm1d, nn.SyncBatchNorm, nn.GroupNorm, nn.InstanceNorm1d),
    *(nn.AvgPool1d, nn.MaxPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
)


def _overlaps(module: nn.Conv1d | nn.ConvTranspose1d) -> bool:
    """Returns whether the windows of `module` overlap; if not, none reaches from a slice into the next."""
    reach = module.dilation[0] * (module.kernel_size[0] - 1) + 1
    return reach > module.stride[0]


def _mixes(name: str, module: nn.Module) -> Diagnostic:
    """Returns the diagnostic of a module that looks along the sequence."""
    return Diagnostic(
        "sequence-mixing",
        f"`{name}` is a {type(module).__name__}, which looks along the sequence and would see one slice alone",
        ("sequence", "use"),
        hint="train such a model with `sp = 1`; where it runs over something else than positions, name it in "
        "`[sequence] apart`",
    )


def _unused(pattern: str) -> Diagnostic:
    message = f"`apart` has the pattern `{pattern}`, which matches no layer and no module that would be refused"
    return Diagnostic("sequence-mixing", message, ("sequence", "apart"), hint="leave it out, or see `train-cli show`")
