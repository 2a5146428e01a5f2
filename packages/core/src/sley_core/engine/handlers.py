"""Core's gradient handlers: `core.each`, one all-reduce per parameter, and `core.gradient_norms`, the norm of every gradient.

`core.each` is slow and simple; faster reducers are tested against it.
"""

from functools import partial

from torch import Tensor

from sley_core.comm.exchanges import SentBytes
from sley_core.comm.transport import Work
from sley_core.engine.buffers import Layout
from sley_core.engine.parts import Parts, StepState
from sley_core.engine.reduction import Sums
from sley_core.engine.registry import Param
from sley_core.plugin import EachConfig, GradientNormsConfig
from sley_core.protocols import GradientHandler


class Each(GradientHandler):
    """Sums each gradient over its reduce group, in the store's order, unless the group has one rank."""

    def __init__(self, config: EachConfig) -> None:
        self.config = config
        self._pending: list[Work] = []
        self._sent = SentBytes()
        self._sums: Sums | None = None

    def attach(self, parts: Parts) -> None:
        """Gives each reduced parameter its own buffer if sums have a fixed order."""
        self._store = parts.store
        self._groups = parts.groups
        self._sums = parts.store.reduction.sums(parts.store, self._sent)
        if self._sums is not None:
            parts.store.lay_out(self._plan_layout)

    def begin_step(self, step: StepState) -> None:
        """Waits for the reductions of a failed step, if any, since these could still write into the gradients."""
        if self._sums is not None:
            self._sums.discard()
        self._wait()
        self._sent.begin_step()

    def gradient_ready(self, param: Param, step: StepState) -> None:
        group = self._groups[param.reduce_group]
        if group.size == 1:
            return
        # A collective over the parameter's reduce group: the store reports parameters in the same order on all its ranks.
        if self._sums is not None:
            buffer = self._store.buffer_of(param)
            assert buffer is not None, param
            self._sums.start(buffer, group)
            return
        gradient = self._store.gradient(param)
        self._pending.append(group.all_reduce(gradient, label=param.name))
        self._sent.add(gradient, group, passes=2)

    def finish_step(self, step: StepState) -> None:
        if self._sums is not None:
            self._sums.finish()
        self._wait()
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        return self._sent.counts()

    def _plan_layout(self, params: list[Param]) -> Layout:
        loose = [param for param in params if self._groups[param.reduce_group].size == 1]
        return Layout([[param] for param in params if param not in loose], params, loose)

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []


class GradientNorms(GradientHandler):
    """Adds `gradient_norm/NAME` to each row for each parameter that is trained when the run starts: the 2-norm of the full,
    unscaled gradient before clipping, in fp64. It is the same in every layout, and 0 while the parameter is frozen.
    """

    def __init__(self, config: GradientNormsConfig) -> None:
        self.config = config

    def attach(self, parts: Parts) -> None:
        """Adds one number per trained parameter to the rows: the root of the sum of all ranks' `_squared_norm_share`."""
        self._store = parts.store
        for param in parts.registry.trainable:
            share = partial(self._squared_norm_share, param, parts.numbers.replica_weight(param))
            parts.numbers.add(f"gradient_norm/{param.name}", share, of="root")

    def _squared_norm_share(self, param: Param, replica_weight: float) -> Tensor | float:
        """Returns this rank's share of the squared norm; the ranks' shares add up to it."""
        if param not in self._store:
            return 0.0
        # `replica_weight` assumes that each rank of the reduce group has all elements, but `num_shards` ranks may share a copy.
        return self._store.part(param).double().square().sum() * replica_weight * self._store.num_shards(param)
