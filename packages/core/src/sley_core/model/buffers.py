"""Buffers that training writes, which would differ between ranks; and modules that stay in evaluation mode.

A running mean, for example, is the mean of this rank's samples, and nothing reduces it. A model with such buffers declares them
(`Model(per_rank_buffers=("*.running_mean", ...))`), or does without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sley_core.errors import PlanError
from sley_core.model.layers import MODEL, Layer, Model

NAMED = 3


def is_per_rank(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether the buffer `name` may be written: `Model.per_rank_buffers` has a pattern of it."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def refuse_written(written: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises PlanError "model-buffer-written" if training writes any buffer. written: name and module of each."""
    if not written:
        return
    kinds = " and ".join(dict.fromkeys(type(module).__name__ for _, module in written))
    names = ", ".join(f"`{name}`" for name, _ in written[:NAMED]) + (", ..." if len(written) > NAMED else "")
    count = f"{len(written)} buffer{'' if len(written) == 1 else 's'}"
    patterns = ", ".join(dict.fromkeys(f'"*.{name.rpartition(".")[2]}"' for name, _ in written))
    others = ", or use GroupNorm" if any(isinstance(module, _NormBase) for _, module in written) else ""
    raise PlanError(
        "model-buffer-written",
        f"training writes {count} of {kinds} ({names}), which would differ between ranks",
        path=MODEL,
        hint="to let each replica keep its own, return "
        f"`sley_core.api.model.Model(layers, per_rank_buffers=({patterns},))` from the factory{others}",
    )


def train(model: Model) -> None:
    """Puts the layers of `model` into training mode, apart from modules that stay in evaluation mode.

    `from_pretrained` returns a model in evaluation mode, whose dropout would never be applied. torch's `train()` is called, so
    a module that overrides it decides for itself, and a program may call `eval()` on modules of a run afterwards. Two kinds of
    modules that the factory left in evaluation mode stay in it, though `train()` would change them:

    * a frozen module within one that is in training mode: somebody has called `eval()` on it;
    * a BatchNorm whose statistics may not be written (`model.buffers`), since no rank shares them with another.
    """
    is_training = any(layer.module.training for layer in model.layers)
    for layer in model.layers:
        kept = list(_kept(layer.module, layer.name, model.per_rank_buffers, is_training))
        modes = [(part, part.training) for module in kept for part in module.modules()]
        layer.module.train()
        for part, was in modes:
            part.training = was


def notes_of(layers: Sequence[Layer]) -> list[str]:
    """Returns a note for the user with the modules that are in evaluation mode; an empty list if there are none."""
    names = [name for layer in layers for name in _evaluated(layer.module, layer.name)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"stays in evaluation mode, as the factory left it: {', '.join(names[:NAMED])}{more}"] if names else []


def _kept(module: nn.Module, name: str, per_rank: Sequence[str], is_training: bool) -> Iterator[nn.Module]:
    """Yields the modules that stay in evaluation mode. is_training: of what contains `module`. per_rank: as `is_per_rank`."""
    is_norm = isinstance(module, _NormBase) and not is_per_rank(f"{name}.running_mean", per_rank)
    if not module.training and (is_norm or (is_training and _is_frozen(module))):
        yield module
        return
    for key, child in module.named_children():
        yield from _kept(child, f"{name}.{key}", per_rank, module.training)


def _is_frozen(module: nn.Module) -> bool:
    trained = [parameter.requires_grad for parameter in module.parameters()]
    return bool(trained) and not any(trained)


def _evaluated(module: nn.Module, name: str) -> Iterator[str]:
    """Yields the names of the outermost modules of a tree that are in evaluation mode."""
    if not module.training:
        yield name
        return
    for key, child in module.named_children():
        yield from _evaluated(child, f"{name}.{key}")
