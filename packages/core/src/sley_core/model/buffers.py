"""Buffers that training writes, which would differ between ranks; and modules that stay in evaluation mode.

A running mean, for example, is the mean of this rank's samples, and is not reduced. A model must declare such buffers
(`Model(per_rank_buffers=("*.running_mean", ...))`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sley_core.errors import PlanError
from sley_core.model.layers import MODEL, Layer, Model
from sley_core.words import shorten_names

MAX_NAMES = 3


def is_per_rank(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether the buffer `name` may be written, i.e. matches one of `patterns` (`Model.per_rank_buffers`)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_written_buffers(written: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises PlanError "model-buffer-written" if `written` is not empty. written: name and module of each written buffer."""
    if not written:
        return
    types = " and ".join(dict.fromkeys(type(module).__name__ for _, module in written))
    names = ", ".join(f"`{name}`" for name, _ in written[:MAX_NAMES]) + (", ..." if len(written) > MAX_NAMES else "")
    num_buffers = f"{len(written)} buffer{'' if len(written) == 1 else 's'}"
    patterns = ", ".join(dict.fromkeys(f'"*.{name.rpartition(".")[2]}"' for name, _ in written))
    alternative = ", or use GroupNorm" if any(isinstance(module, _NormBase) for _, module in written) else ""
    raise PlanError(
        "model-buffer-written",
        f"training updates {num_buffers} of {types} ({names}), whose values would differ between ranks",
        path=MODEL,
        hint="to keep separate values per replica, return `sley_core.api.model.Model(layers, "
        f"per_rank_buffers=({patterns},))` from the factory{alternative}",
    )


def set_train_mode(model: Model) -> None:
    """Puts the layers of `model` into training mode, except modules that must stay in evaluation mode.

    `from_pretrained` returns a model in evaluation mode, without dropout. This calls torch's `train()`, which a module may
    override. A program may call `eval()` on modules of a run afterwards. Two kinds of modules stay in evaluation mode if the
    factory left them so:

    * a frozen module within one in training mode: the factory has called `eval()` on it;
    * a BatchNorm whose statistics may not be written (`model.buffers`), since ranks do not share them.
    """
    is_training = any(layer.module.training for layer in model.layers)
    for layer in model.layers:
        modules = list(_modules_in_evaluation(layer.module, layer.name, model.per_rank_buffers, is_training))
        modes = [(part, part.training) for module in modules for part in module.modules()]
        layer.module.train()
        for part, mode in modes:
            part.training = mode


def evaluation_notes(layers: Sequence[Layer]) -> list[str]:
    """Returns a note for the user that lists the modules in evaluation mode; [] if there are none."""
    names = [name for layer in layers for name in _names_in_evaluation(layer.module, layer.name)]
    message = f"the factory left these modules in evaluation mode, and they stay in it: {shorten_names(names, MAX_NAMES)}"
    return [message] if names else []


def _modules_in_evaluation(module: nn.Module, name: str, per_rank: Sequence[str], is_training: bool) -> Iterator[nn.Module]:
    """Yields the modules that stay in evaluation mode. is_training: the parent's mode.

    per_rank: patterns, as in `is_per_rank`.
    """
    is_norm = isinstance(module, _NormBase) and not is_per_rank(f"{name}.running_mean", per_rank)
    if not module.training and (is_norm or (is_training and _is_frozen(module))):
        yield module
        return
    for key, child in module.named_children():
        yield from _modules_in_evaluation(child, f"{name}.{key}", per_rank, module.training)


def _is_frozen(module: nn.Module) -> bool:
    flags = [parameter.requires_grad for parameter in module.parameters()]
    return bool(flags) and not any(flags)


def _names_in_evaluation(module: nn.Module, name: str) -> Iterator[str]:
    """Yields the names of the outermost modules in evaluation mode."""
    if not module.training:
        yield name
        return
    for key, child in module.named_children():
        yield from _names_in_evaluation(child, f"{name}.{key}")
