"""Refuses models whose gradients cannot be summed in one order in every layout, whatever layout the plan has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from sley_core.engine.direct import is_plain_embedding, is_plain_linear
from sley_core.errors import Diagnostic, PlanError
from sley_core.model.layers import MODEL

if TYPE_CHECKING:
    from sley_core.engine.book import Stages

FAST = 'use [parallel] reduction = "fast"'
Use = tuple[str, nn.Module, int]
"""A use of a parameter: its name there, the module that holds it, and that module's stage."""


def check_canonical(stages: Stages, per_rank_buffers: Sequence[str]) -> None:
    """Raises PlanError "canonical-tie" for parameters that several layers hold, in modules other than plain linears and
    embeddings, or in more than two layers on several stages; "canonical-buffers" for buffers that training writes.

    stages: all parts of the model, on meta: the same on all ranks.
    """
    found = [*_ties(stages)]
    if per_rank_buffers:
        message = f"each rank writes its own {', '.join(per_rank_buffers)}, from the samples that it has"
        found.append(
            Diagnostic("canonical-buffers", message, path=MODEL, hint=f"{FAST}, or modules without such buffers")
        )
    if found:
        raise PlanError.many(found)


def _ties(stages: Stages) -> Iterator[Diagnostic]:
    """Yields a diagnostic "canonical-tie" for each shared parameter whose gradients cannot be summed in one order."""
    uses: dict[int, dict[str, list[Use]]] = {}  # of each parameter, by layer
    for stage, layers in stages:
        for layer in layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name, remove_duplicate=False):
                for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    of = uses.setdefault(id(parameter), {})
                    of.setdefault(layer.name, []).append((f"{prefix}.{attribute}", module, stage))
    for by_layer in uses.values():
        if len(by_layer) == 1:
            continue
        every = [use for each in by_layer.values() for use in each]
        name = every[0][0]
        odd = next((use for use in every if not (is_plain_linear(use[1]) or is_plain_embedding(use[1]))), None)
        if odd is not None:
            kind = type(odd[1]).__name__
            message = f"{name!r} is {odd[0]!r} too, in a {kind}: autograd adds the gradients of both, or ranks do"
            hint = f"{FAST}, or tie the weights of plain nn.Linear and nn.Embedding"
            yield Diagnostic("canonical-tie", message, path=MODEL, hint=hint)
        elif len({use[2] for use in every}) > 1 and len(by_layer) > 2:
            count = len(by_layer)
            message = (
                f"{count} layers hold {name!r}, on several stages, which add its gradients in an order of their own"
            )
            yield Diagnostic("canonical-tie", message, path=MODEL, hint=f"{FAST}, or `pp = 1`")
