"""`pp.shared_modules`: keeps parameters that several stages hold (ties) equal on all of these stages.

All copies start equal, since they are initialized with the same random numbers. Each copy gets the sum of the gradients of all
copies and takes the same optimizer step. The sum is the last operation on a gradient before the norm, so copies stay equal bit
for bit. The engine compares copies as it compares replicas. Norm, clipping and parameter counts include each tie only once.
"""

import torch

from sley_core.api.comm import SentBytes
from sley_core.api.parts import Param, Parts, StepState
from sley_core.protocols import GradientHandler
from sley_pp.plugin import SharedModulesConfig


class SharedModules(GradientHandler):
    """Sums the gradients of ties over the stages that hold them, with one all-reduce for all ties with the same stages."""

    def __init__(self, config: SharedModulesConfig) -> None:
        self._sent = SentBytes()

    def attach(self, parts: Parts) -> None:
        """Groups the ties in the registry by axis. Axes and names are sorted, so that all ranks use the same order."""
        self._groups = parts.groups
        self._store = parts.store
        ties = sorted((str(param.tie_axis), param.name) for param in parts.registry if param.tie_axis is not None)
        self._ties: dict[str, list[Param]] = {axis: [] for axis, _ in ties}
        for axis, name in ties:
            self._ties[axis].append(parts.registry[name])

    def finish_step(self, step: StepState) -> None:
        """All-reduces the gradients of this rank's ties, in one buffer per group of stages, and waits for the sums."""
        self._sent.begin_step()
        reductions = []
        for axis, params in self._ties.items():
            # After a reduce-scatter, all ranks of the group have the same elements of a gradient, or none.
            gradients = [self._store.part(param) for param in params if param in self._store]
            gradients = [gradient for gradient in gradients if gradient.numel()]
            if not gradients:
                continue
            flat = gradients[0] if len(gradients) == 1 else torch.cat([gradient.reshape(-1) for gradient in gradients])
            # The group has one rank of each stage that holds the ties. All ranks use their groups in the same order.
            group, label = self._groups[axis], f"the tied gradients of {', '.join(param.name for param in params)}"
            reductions.append((group.all_reduce(flat, label=label), flat, gradients))
            self._sent.add(flat, group, passes=2)
        for pending, flat, gradients in reductions:
            pending.wait()
            if len(gradients) > 1:
                sums = torch.split(flat, [gradient.numel() for gradient in gradients])
                torch._foreach_copy_(
                    gradients, [total.view(gradient.shape) for total, gradient in zip(sums, gradients, strict=True)]
                )
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the number of bytes that this rank sent in the last step to sum gradients, as `sent_bytes_per_step`."""
        return self._sent.counts()
