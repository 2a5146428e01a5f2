"""Sorts parameters into groups that share a learning rate and a decay, and finds those that are frozen.

Groups go by names that do not depend on the layout, so that every rank and every layout cuts them alike. The first
group whose pattern matches has a parameter: exceptions stand above the rule, and a group without options is one. A tied
weight goes by its first name alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from sley_core.errors import Diagnostic, PlanError
from sley_core.optim.config import GroupConfig, OptimizerConfig

if TYPE_CHECKING:
    import torch


_NO_OPTIONS = GroupConfig(match="*")


class Grouped(Protocol):
    """What a parameter must provide to be put into a group; an entry of the parameter book does.

    decays: whether the optimizer's own decay applies, i.e. it is a matrix and belongs to no norm.
    """

    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> torch.Tensor: ...
    @property
    def decays(self) -> bool: ...


def frozen(names: Iterable[str], config: OptimizerConfig, aliases: Mapping[str, str] | None = None) -> set[str]:
    """Returns the names that the plan freezes. `names`: of the full model, whatever part of it this rank owns.

    aliases: the other names of tied weights, which groups cannot match, with the name to use instead.
    Raises PlanError "group-unmatched" for every group that no name falls to, with close names, and "all-frozen" if
    nothing is left to train.
    """
    every = list(names)
    owner = {name: _first_match(name, config.groups) for name in every}
    unmatched = [index for index in range(len(config.groups)) if index not in set(owner.values())]
    if unmatched:
        raise PlanError.many(_unmatched(index, every, config.groups, aliases or {}) for index in unmatched)
    found = {name for name, index in owner.items() if index is not None and config.groups[index].freeze}
    if every and len(found) == len(every):
        raise PlanError(
            "all-frozen",
            f"every one of the {len(every)} parameters is frozen, so there is nothing to train",
            path=("optimizer", "groups"),
            hint="narrow the pattern of a group with `freeze = true`",
        )
    return found


EVERYWHERE_ALIKE = {"foreach": True}
"""An option of every group where an element must get the same bits wherever in a tensor it lies; `optim.build` sees it."""


def parameter_groups(
    entries: Iterable[Grouped], config: OptimizerConfig, more: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Returns torch.optim's parameter groups, one for each (learning rate, weight decay), in the order of the entries.

    A group's own `weight_decay` is taken as written; else a parameter that does not decay has 0. `initial_lr` keeps the
    full rate that `scale_learning_rate` scales. Without entries there is one empty group, which torch.optim accepts.
    Leave frozen entries out (see `frozen`); one that a program unfreezes later has the optimizer's options. more: options of
    every group.
    """
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for entry in entries:
        index = _first_match(entry.name, config.groups)
        group = _NO_OPTIONS if index is None else config.groups[index]
        lr = config.lr if group.lr is None else group.lr
        decay = config.weight_decay if entry.decays else 0.0
        decay = decay if group.weight_decay is None else group.weight_decay
        groups.setdefault((lr, decay), []).append(entry.parameter)
    if not groups:
        groups[config.lr, config.weight_decay] = []
    return [
        {"params": parameters, "lr": lr, "initial_lr": lr, "weight_decay": decay, **(more or {})}
        for (lr, decay), parameters in groups.items()
    ]


def scale_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's rate to `factor` times its full rate (`initial_lr`)."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def _first_match(name: str, groups: Sequence[GroupConfig]) -> int | None:
    """Returns the index of the first group whose pattern matches `name`, or None."""
    for index, group in enumerate(groups):
        if fnmatchcase(name, group.match):
            return index
    return None


def _unmatched(
    index: int, names: Sequence[str], groups: Sequence[GroupConfig], aliases: Mapping[str, str]
) -> Diagnostic:
    """Returns the diagnostic of group `index`, which gets no parameter, with the reason: an earlier group, a tie, or a typo."""
    pattern = groups[index].match
    path = ("optimizer", "groups", index, "match")
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if matches:
        first = _first_match(matches[0], groups)
        assert first is not None, matches[0]
        message = (
            f"`{pattern}` matches nothing that an earlier group, as `{groups[first].match}`, does not have already"
        )
        return Diagnostic("group-unmatched", message, path, hint="put the narrower pattern first")
    for alias in aliases:
        if fnmatchcase(alias, pattern):
            message = f"`{pattern}` matches `{alias}`, which is tied to `{aliases[alias]}` and goes by that name"
            return Diagnostic("group-unmatched", message, path, hint=f"write `{aliases[alias]}`: copies have one rate")
    close = get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names[:3])
    hint = "names look like " + ", ".join(f"`{name}`" for name in close) if close else None
    return Diagnostic("group-unmatched", f"`{pattern}` matches no parameter", path, hint=hint)
