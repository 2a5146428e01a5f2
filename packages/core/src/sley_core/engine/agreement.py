"""Checks that ranks agree: on the plan before the run, on each step before its first gradient is sent, and on its exchanges.

    begin ──> first action of the step ──> check ──> everything else
      └── one small sum over all ranks, on the hosts, during that action; it includes the loss weight and counts of the batch

Ranks must agree on the frozen parameters, the number of microbatches and the batch, since these determine which gradients are
summed, and the number and length of messages. A mismatch would give wrong numbers, crash the process (gloo), or hang.

Each rank hashes its view of each fact, once for each of its groups (the hash includes the group), and adds the hash times -1.
The first rank of the group also adds its hash times the group's size. The sum is 0 if all ranks agree, and with a probability
of 2^-32 if they do not. All ranks see the same sum. If it is not 0, they gather their views and raise the same error. If ranks
wait for each other in the first action, the check runs before it.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch

from sley_core.comm.exchanges import MISMATCH_HINT, ExchangeSummary, checksum
from sley_core.comm.transport import Work
from sley_core.comm.world import Group, Groups
from sley_core.engine.gradients import GradientStore
from sley_core.engine.parts import StepState
from sley_core.engine.reduction import Reduction
from sley_core.engine.step_batch import NO_COUNTS, BatchCounts, StepBatch
from sley_core.errors import RunError, shorten_names
from sley_core.model.tensors import flat_bytes

CALL, TRAINED, MICROS, BATCH = range(4)
"""The facts that ranks compare: the call, the trained parameters, the number of microbatches, and the samples."""

_REFUSALS, _COUNTS, _WEIGHT = 4, 5, 5 + len(NO_COUNTS)
"""The indices in the summed float64 tensor of the number of refusals, the first count, and the first weight term. All elements
before the weight terms are integers below 2^53, so their sums are exact. No other exchange of these ranks has this length.
"""

_END_BYTES = 1 << 12
"""The number of bytes that are hashed at the beginning of each batch field, and at its end."""

_HINTS = {
    CALL: "call the same methods of a run in the same order on all ranks, and check whether some ranks caught an error",
    TRAINED: "freeze and unfreeze the same parameters on all ranks, between two steps",
    MICROS: "ranks of one pipeline, and ranks that share weights or sequences, must run the same number of "
    "microbatches; with canonical sums, all ranks must",
    BATCH: "pass the same samples, the rows `run.rows` of a batch, to all stages of a pipeline and all "
    "ranks that share a sequence",
}

View = tuple[Any, int]
"""A rank's value of a fact, as a description for errors and as a checksum."""


class Agreement:
    """Compares the ranks of `groups` in a step, and sums `weight` and `counts` of the global batch, which are valid after
    `check`. store: the gradient store, whose trained parameters are compared; None for an evaluation.
    """

    def __init__(self, groups: Groups, store: GradientStore | None = None) -> None:
        self.groups = groups
        self.store = store
        self.reduction = Reduction(groups, StepState()) if store is None else store.reduction
        self.weight = 0.0
        self.counts = NO_COUNTS
        self._control = groups["control"]
        self._facts: list[dict[str, View]] = []
        self._refusal: RunError | None = None
        self._layout = -1
        self._trained: dict[str, View] = {}
        self._sum = torch.zeros(0, dtype=torch.float64)
        self._pending: Work | None = None

    def begin(self, label: str, batch: StepBatch | None = None, refusal: RunError | None = None) -> "Agreement":
        """Starts one asynchronous all-reduce over all ranks on the host, and returns this object. Every rank calls this, and
        then `check`.

        label: the name of the work that begins, for errors. batch: this rank's samples. Their weights are summed over all
        ranks; ranks without the loss pass none. Their counts are summed over the ranks that are first along `pp` and `sp`.
        refusal: the reason why this rank cannot begin; `check` raises the first rank's refusal on all ranks.
        """
        terms = self.reduction.weight_terms(batch.weights if batch else ())
        self.weight = self.reduction.weight_of(terms)
        self.counts = batch.counts if batch else NO_COUNTS
        self._refusal = refusal
        if not self._control.has_peers:
            return self
        num_microbatches = batch.num_microbatches if batch else 0
        self._facts = [
            {"all": (label, checksum([label]))},
            self._trained_views(),
            dict.fromkeys(self.reduction.micro_axes, (num_microbatches, num_microbatches)),
            {} if batch is None else self._sample_views(batch),
        ]
        is_first = all(self.groups[axis].coord == 0 for axis in ("pp", "sp"))
        counts = self.counts if is_first else NO_COUNTS
        self._sum = torch.tensor([0.0] * _REFUSALS + [float(refusal is not None), *counts, *terms], dtype=torch.float64)
        for index, fact in enumerate(self._facts):
            self._sum[index] = sum(difference_term(self.groups[axis], number) for axis, (_, number) in fact.items())
        # On the hosts of all ranks; every step and every evaluation begins with it.
        self._pending = self._control.all_reduce(self._sum, label=f"the agreement before {label}")
        return self

    def check(self) -> None:
        """Waits for the sum; sets `weight` and `counts`. Raises `ranks-differ` or the first rank's refusal on all ranks."""
        if self._pending is None:
            if self._refusal is not None:
                raise self._refusal
            return
        self._pending.wait()
        self._pending = None
        if self._sum[:_REFUSALS].any():
            raise self._mismatch_error()
        if self._sum[_REFUSALS]:
            fault = None if self._refusal is None else self._refusal.diagnostics[0]
            parts = None if fault is None else [fault.code, fault.message, fault.hint]
            refusals = self._control.gather_objects(parts, label="the reason why a step is refused")
            code, message, hint = next(refusal for refusal in refusals if refusal)
            raise RunError(code, message, hint=hint)
        self.weight = self.reduction.weight_of(self._sum[_WEIGHT:].tolist())
        self.counts = BatchCounts(*self._sum[_COUNTS:_WEIGHT].tolist())

    def _trained_views(self) -> dict[str, View]:
        """Returns the trained parameters in layout order, by the axis whose ranks must agree. Computes them once per layout."""
        if self.store is not None and self._layout != self.store.num_layouts:
            self._layout = self.store.num_layouts
            names = tuple(param.name for param in self.store.params)
            lengths = (str(buffer.data.numel()) for buffer in self.store.buffers)
            self._trained = {"stage": (names, checksum([*names, *lengths]))}
            ties: dict[str, list[str]] = {param.tie_axis: [] for param in self.store.registry if param.tie_axis is not None}
            for param in self.store.registry:
                if param.tie_axis is not None and param in self.store:
                    ties[param.tie_axis].append(param.name)
            self._trained |= {axis: (tuple(sorted(tied)), checksum(sorted(tied))) for axis, tied in ties.items()}
        return self._trained

    def _sample_views(self, batch: StepBatch) -> dict[str, View]:
        """Returns shapes and checksums of the batch, by the axis whose ranks must have the same samples."""
        axes = [axis for axis in ("pp", "sp") if self.groups[axis].size > 1]
        if not axes:
            return {}
        values = [item for part in batch.whole for item in sorted(part.items())]
        descriptions = tuple(f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for name, value in values)
        number = checksum(descriptions)
        for _, value in values:
            data = flat_bytes(value)
            number = zlib.crc32(bytes(data[:_END_BYTES].numpy()) + bytes(data[-_END_BYTES:].numpy()), number)
        return dict.fromkeys(axes, (descriptions, number))

    def _mismatch_error(self) -> RunError:
        """Returns the error `ranks-differ`, the same on all ranks. A blocking collective on `control`."""
        # Views are keyed by the label of the group that must agree, and travel as JSON: [description, checksum].
        local_views = [{str(self.groups[axis]): view for axis, view in fact.items()} for fact in self._facts]
        views = self._control.gather_objects(local_views, label="the differences between ranks")
        for fact, differ in enumerate(self._sum[:_REFUSALS].tolist()):
            for label in dict.fromkeys(label for view in views for label in view[fact]) if differ else ():
                by_rank = zip(self._control.ranks, views, strict=True)
                views_by_rank = {rank: view[fact][label] for rank, view in by_rank if label in view[fact]}
                if len({number for _, number in views_by_rank.values()}) > 1:
                    return RunError("ranks-differ", _mismatch_message(fact, views_by_rank), hint=_HINTS[fact])
        raise AssertionError(f"the sum is {self._sum.tolist()}, but all views are equal: {views}")


def _mismatch_message(fact: int, views: Mapping[int, View]) -> str:
    usual_checksum, _ = Counter(number for _, number in views.values()).most_common(1)[0]
    peer = next(rank for rank, (_, number) in views.items() if number == usual_checksum)
    rank = next(rank for rank, (_, number) in views.items() if number != usual_checksum)
    rank_value, peer_value = views[rank][0], views[peer][0]
    if fact == CALL:
        return f"rank {rank} starts {rank_value}, but rank {peer} starts {peer_value}"
    if fact == MICROS:
        return f"rank {rank} runs {rank_value} microbatches in this step, but rank {peer} runs {peer_value}"
    if fact == BATCH:
        pairs = zip_longest(rank_value, peer_value, fillvalue="none")
        rank_field, peer_field = next(((left, right) for left, right in pairs if left != right), ("", ""))
        if not rank_field:
            return f"rank {rank} received other samples than rank {peer}"
        return f"rank {rank} received the batch field {rank_field}, but rank {peer} received {peer_field}"
    differing = [name for name in (*rank_value, *peer_value) if (name in rank_value) != (name in peer_value)]
    if not differing:
        return f"rank {rank} reduces its gradients in another order, or in other buffers, than rank {peer}"
    trains, freezes = (rank, peer) if differing[0] in rank_value else (peer, rank)
    suffix = f" ({len(differing) - 1} more parameters differ)" if len(differing) > 1 else ""
    return f"{differing[0]} is trained on rank {trains}, but frozen on rank {freezes}{suffix}"


def agree(
    facts: Mapping[str, str], control: Group, parts: Mapping[str, Callable[[], Mapping[str, str]]] = MappingProxyType({})
) -> None:
    """Compares `facts` (plan digest, versions, group table) over all ranks. A blocking collective on `control`.

    parts: for some facts, a function that returns the fact's parts; it is called only if ranks differ. Raises RunError
    `ranks-disagree` on all ranks, with the fact, a rank in the minority, and both values.
    """
    values_of_ranks = control.gather_objects(dict(facts), label="the values that all ranks compare")
    for name in facts:
        values = {rank: str(view.get(name)) for rank, view in zip(control.ranks, values_of_ranks, strict=True)}
        usual_value, _ = Counter(values.values()).most_common(1)[0]
        odd_ranks = [rank for rank, value in values.items() if value != usual_value]
        if not odd_ranks:
            continue
        odd_rank, usual_rank = odd_ranks[0], next(rank for rank, value in values.items() if value == usual_value)
        suffix = f" (and {len(odd_ranks) - 1} more)" if len(odd_ranks) > 1 else ""
        message = f"rank {odd_rank}{suffix} has {name} {values[odd_rank]}, rank {usual_rank} has {usual_value}"
        if name in parts:
            # All ranks get here, since they compare the same values.
            all_parts = control.gather_objects(dict(parts[name]()), label=f"the parts of {name}")
            parts_of = dict(zip(control.ranks, all_parts, strict=True))
            if differences := describe_differences(parts_of[odd_rank], parts_of[usual_rank]):
                thing = name.removeprefix("the ")
                message = f"rank {odd_rank}{suffix} has another {thing} than rank {usual_rank}: {differences}"
        raise RunError("ranks-disagree", message, hint="install the same versions and use the same plan on every node")


def describe_differences(actual: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """Returns a text with up to three differing parts and both values of each."""
    names = [name for name in {**actual, **usual} if actual.get(name) != usual.get(name)]
    return shorten_names([f"`{name}` is {actual.get(name, 'unset')}, not {usual.get(name, 'unset')}" for name in names], 3)


Exchanges = dict[str, ExchangeSummary]
"""Summaries of a rank's exchanges without marks, by group label."""

_NO_EXCHANGES = ((), 0, 0, "")


def difference_term(group: Group, number: int) -> int:
    """Returns this rank's term of a sum over all ranks that is 0 if the ranks of `group` have the same `number`.

    The term is an integer below 2^32 x the group's size, and float64 sums are exact below 2^53. If ranks differ, the sum is 0
    with a probability of 2^-32. The hash includes the group, so that differences in two groups do not cancel.
    """
    digest = blake2b(f"{group.axis} {group.ranks[0]} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") * (group.size - 1 if group.ranks[0] == group.rank else -1)


def collect_exchanges(groups: Iterable[Group]) -> Exchanges:
    """Returns summaries of this rank's exchanges since the logs of `groups` were cleared, by the group's label."""
    # This runs in every step, so labels, which list the group's ranks, are made only for groups with exchanges.
    return {str(group): exchanged for group in groups if (exchanged := group.exchange_log.summarise(group.ranks)) is not None}


def exchange_difference(groups: Iterable[Group]) -> int:
    """Returns this rank's term of a sum over all ranks that is 0 if the ranks of each group made the same exchanges."""
    summaries = ((group, group.exchange_log.summarise(group.ranks)) for group in groups)
    return sum(difference_term(group, summary.checksum) for group, summary in summaries if summary is not None)


def exchange_mismatch_error(when: str, local_exchanges: Exchanges, control: Group) -> RunError:
    """Returns the error `ranks-differ`, the same on all ranks, with the first group whose exchanges differ and two of its
    ranks. A blocking collective on `control`. when: the name of the step, for the message. local_exchanges: this rank's
    exchanges.
    """
    views = control.gather_objects(local_exchanges, label="the collectives of all ranks")
    groups: dict[str, Sequence[int]] = {label: exchanged[0] for view in views for label, exchanged in view.items()}
    for label, ranks in groups.items():
        by_rank = {rank: tuple(views[rank].get(label, _NO_EXCHANGES))[1:] for rank in ranks}
        (usual, _), *rare_exchanges = Counter(by_rank.values()).most_common()
        if rare_exchanges:
            usual_rank = next(rank for rank, exchanged in by_rank.items() if exchanged == usual)
            odd_rank = next(rank for rank, exchanged in by_rank.items() if exchanged != usual)
            odd_exchanges, usual_exchanges = _format_exchanges(by_rank[odd_rank]), _format_exchanges(usual)
            message = f"{when}: in {label}, rank {odd_rank} ran {odd_exchanges}, but rank {usual_rank} ran {usual_exchanges}"
            return RunError("ranks-differ", message, hint=MISMATCH_HINT)
    raise AssertionError(f"all ranks made the same exchanges: {views}")


def _format_exchanges(exchanged: Sequence[Any]) -> str:
    times, _, last = exchanged
    return f"{times} collectives, the last of them {last}" if times else "none"
