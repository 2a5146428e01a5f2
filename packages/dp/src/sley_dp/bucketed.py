"""`dp.bucketed`: sums each bucket of gradients as soon as its last gradient is complete.

A bucket is a slice of the gradient store, so it is summed in place, and the optimizer reads the sum there. Buckets are filled
in reverse order of use, which is the order in which the store reports gradients.

    backward   |---- block 7 ----|---- block 6 ----|---- block 5 ----| ...
    reduction                    |-- bucket 0 --|  |-- bucket 1 --|

The design follows PyTorch's DistributedDataParallel (Li et al., 2020, section 3.2).
"""

from collections.abc import Iterable, Mapping

from sley_core.api.comm import Group, SentBytes
from sley_core.api.parts import GradientBuffer, Layout, Param, Parts, StepState, Sums, split_by_size
from sley_core.protocols import GradientHandler
from sley_dp.plugin import BucketedConfig
from sley_dp.sums import Bf16Sums, ExactSums


class BucketedReducer(GradientHandler):
    """Sums each gradient over its reduce group once per optimizer step, overlapped with the last backward.

    The sums equal those of `core.each`. With `reduction = "bf16"`, their relative error is at most 2^-7, unless terms cancel.
    """

    def __init__(self, config: BucketedConfig) -> None:
        self._config = config
        self._sent = SentBytes()
        self._last_params: set[Param] = set()

    def attach(self, parts: Parts) -> None:
        """Lays out the gradient store in buckets."""
        self._store = parts.store
        self._groups = parts.groups
        self.sums: Sums = Bf16Sums(self._sent)
        if self._config.reduction != "bf16":
            self.sums = parts.store.reduction.sums(parts.store, self._sent) or ExactSums(self._sent)
        self._store.lay_out(self._plan_layout)

    def begin_step(self, step: StepState) -> None:
        """Discards the sums of a failed step, and updates the buckets' last parameters, which change if the program freezes or
        unfreezes parameters.
        """
        self.sums.discard()
        self._sent.begin_step()
        self._last_params = find_last_params(self._store.buffers)

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Starts the sum of a bucket if `param` is the last of its parameters.

        All ranks of a reduce group call this in the same order.
        """
        if param in self._last_params:
            buffer = self._store.buffer_of(param)
            assert buffer is not None, param
            self.sums.start(buffer, self._groups[buffer.reduce_group])

    def finish_step(self, step: StepState) -> None:
        """Blocks until every bucket holds its sum."""
        self.sums.finish()
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the number of bytes that this rank sent for the sums of the last step."""
        return self._sent.counts()

    def _plan_layout(self, params: list[Param]) -> Layout:
        """Returns a layout with buckets for each family, filled in the order of `params`."""
        families, unreduced = split_by_family(params, self._groups)
        size_of, bucket_bytes = self._store.aligned_bytes, self._config.bucket_bytes
        buckets = [bucket for family in families for bucket in split_by_size(family, size_of, bucket_bytes)]
        return Layout(buckets, params, unreduced)


def find_last_params(buffers: Iterable[GradientBuffer]) -> set[Param]:
    """Returns the last parameter of each bucket. The store reports gradients in the reverse order of the registry, so this is
    the bucket's parameter with the lowest index.
    """
    return {min(buffer.params, key=lambda param: param.index) for buffer in buffers}


def split_by_family(params: Iterable[Param], groups: Mapping[str, Group]) -> tuple[list[list[Param]], list[Param]]:
    """Returns two lists: the parameters to reduce, split into families, whose members may share buckets, and the parameters
    that need no reduction, since their reduce group has only one rank.
    """
    families: dict[tuple[object, ...], list[Param]] = {}
    unreduced: list[Param] = []
    for param in params:
        is_reduced = groups[param.reduce_group].size > 1
        (families.setdefault(param.family, []) if is_reduced else unreduced).append(param)
    return list(families.values()), unreduced
