"""`pp.shared_modules`: keeps parameters that several stages hold (ties) equal on all of them.

Every copy starts equal (same random numbers), gets the sum of all copies' gradients, and takes the same step. The sum is the
last operation on a gradient before the norm, and is the same on every holder, so copies stay equal bit for bit. The registry
makes norm, clipping and counts include a tie once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sley_core.api.comm import SentBytes, all_reduce
from sley_core.errors import RunError
from sley_core.protocols import GradientHandler

if TYPE_CHECKING:
    from sley_core.api.parts import Param, Parts, StepState
    from sley_pp.config import SharedModulesConfig


class SharedModules(GradientHandler):
    """Sums the gradients of each tie over its holders, those of ties with the same holders in one exchange; groups in order of
    their axes and ties in order of their names, which is the same on all ranks.
    """

    def __init__(self, config: SharedModulesConfig) -> None:
        self.config = config
        self._sent = SentBytes()

    def attach(self, parts: Parts) -> None:
        """Finds the ties in the registry."""
        self._parts = parts
        self._groups = parts.groups
        self._store = parts.store
        self._ties = sorted(param.name for param in parts.registry if param.tie_group is not None)

    def finish_step(self, step: StepState) -> None:
        """All-reduces this rank's gradients of each group of ties over the stages that hold them; blocks. Several gradients are
        copied into one buffer: small ones cost as much time as a message.
        """
        self._sent.begin_step()
        pending = []
        for axis, params in self._by_group().items():
            # If a reducer leaves shards, the ranks of the group have the same elements, maybe none.
            parts = [self._store.part(param) for param in params if param in self._store]
            parts = [part for part in parts if part.numel()]
            if not parts:
                continue
            flat = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
            # Over the ties' own group: one rank of each stage that holds them; all take the groups by axis, the ties by name.
            group, what = self._groups[axis], f"the tied gradients of {', '.join(param.name for param in params)}"
            pending.append((all_reduce(flat, group, what=what), flat, parts))
            self._sent.add(flat, group, passes=2)
        for work, flat, parts in pending:
            work.wait()
            if len(parts) > 1:
                sums = torch.split(flat, [part.numel() for part in parts])
                torch._foreach_copy_(parts, [total.view(part.shape) for total, part in zip(sums, parts, strict=True)])
        self._sent.end_step()

    def _by_group(self) -> dict[str, list[Param]]:
        """Returns the ties by the axis of the group that holds them."""
        by_group: dict[str, list[Param]] = {}
        for name in self._ties:
            param = self._parts.registry[name]
            assert param.tie_group is not None, name
            by_group.setdefault(param.tie_group, []).append(param)
        return dict(sorted(by_group.items()))

    def counts(self) -> dict[str, float]:
        """Returns the bytes that this rank sent in the last step, for the sums of gradients."""
        return self._sent.counts()

    def weights_updated(self, step: StepState) -> None:
        """Checks every `drift_check_steps` steps that the copies are still equal; a collective over the holders."""
        every = self.config.drift_check_steps
        if every and (step.step + 1) % every == 0:
            self._check_drift(step.step + 1)

    def _check_drift(self, number: int) -> None:
        """Raises RunError `tie-drifted` on all holders of a tie whose copies are no longer equal bit for bit."""
        self._parts.weights.settle()
        for name in self._ties:
            param = self._parts.registry[name]
            assert param.tie_group is not None, name
            group = self._groups[param.tie_group]
            value = param.parameter.detach()
            most, least = value.clone(), value.clone()
            # Over the tie's own group; all holders check the same ties after the same step.
            all_reduce(most, group, "max", what=f"the tied weight {name}").wait()
            all_reduce(least, group, "min", what=f"the tied weight {name}").wait()
            if not torch.equal(most, least):
                apart = float((most - least).abs().max())
                raise RunError(
                    "tie-drifted",
                    f"after step {number} the copies of {name} on stages {list(param.stages)} differ by up to {apart:g}",
                    hint="something wrote one copy: load weights on every stage, and give all copies the same options",
                )
