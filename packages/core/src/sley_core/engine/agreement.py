"""Checks that ranks agree: on the plan before the run, on each step before its first gradient is sent, and on its exchanges.

    begin ──> first action of the step ──> check ──> everything else
      └── one small sum over all ranks, on the hosts, during that action; it includes the loss weight and counts of the batch

Ranks must agree on the frozen parameters, the number of microbatches and the batch, since these determine which gradients are
summed, and the number and length of messages. A mismatch would give wrong numbers, crash the process (gloo), or hang.

Each rank hashes its view of each fact, once for each of its groups (the hash includes the group), and adds the hash times -1.
The first rank of the group also adds its hash times the group's size. The sum is 0 if all ranks agree, and with a probability
of 2^-32 if they do not. All ranks see the same sum. If it is not 0, they gather their views and raise the same error. If ranks
wait for each other in the first action, the check runs before it.

`CopyComparison` compares the copies of weights and buffers before the first step and every `COMPARE_EVERY` steps, on every rank
that holds a copy, since replicas that diverge stay different. It compares parameters over their reduce group and, if several
stages hold a parameter, over its tie group. It compares buffers over the stage.

A value that a forward writes differs between replicas, which see different samples, and is written once per microbatch and
recomputation. `WriteWatch` refuses such writes. It compares version counters before and after a layer, in all microbatches of
the first step and in the first microbatch of later steps. torch does not count some writes (`.data`, numpy, running
statistics), so hashes of the values are compared too, in a layer's first call and every `COMPARE_EVERY` steps.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sley_core.comm.exchanges import MISMATCH_HINT, ExchangeSummary, checksum
from sley_core.comm.transport import Work
from sley_core.comm.world import Group, Groups
from sley_core.engine.gradients import GradientStore
from sley_core.engine.parts import MicroStep, Parts, StepState
from sley_core.engine.reduction import Reduction
from sley_core.engine.registry import Param
from sley_core.engine.shards import StandIn
from sley_core.engine.step_batch import NO_COUNTS, BatchCounts, StepBatch
from sley_core.errors import RunError, shorten_names
from sley_core.model.build import check_written_buffers
from sley_core.model.layers import Layer
from sley_core.model.tensors import fingerprint, flat_bytes, matches_any, version_of

CALL, TRAINED, MICROBATCHES, BATCH = range(4)
"""The facts that ranks compare, by index: the work that begins, the trained parameters, the microbatches, and the samples."""

_REFUSALS, _COUNTS, _WEIGHT = 4, 5, 5 + len(NO_COUNTS)
"""Indices into the float64 tensor that ranks sum: one difference term per fact, then the number of refusals, the counts, and
the terms of the loss weight. Elements before the terms of the loss weight are integers below 2^53, so their sums are exact. No
other exchange has a tensor of this length.
"""

_END_BYTES = 1 << 12
"""The number of bytes that are hashed at the beginning of each batch field, and again at its end."""

_HINTS = {
    CALL: "call the same methods of a run in the same order on all ranks, and check whether some ranks caught an error",
    TRAINED: "freeze and unfreeze the same parameters on all ranks, between two steps",
    MICROBATCHES: "run the same number of microbatches on all ranks that share a pipeline, weights or sequences, and, with "
    "canonical sums, on all ranks",
    BATCH: "pass the same samples (the rows `run.rows` of a batch) to all stages of a pipeline, and to all ranks that share "
    "a sequence",
}
"""The hint of the `ranks-differ` error for each fact."""

FactView = tuple[Any, int]
"""A rank's value of a fact: a description for errors, and a checksum or number that ranks compare."""


class RankAgreement:
    """Checks, before each step or evaluation, that all ranks begin the same work, train the same parameters, and have matching
    batches. weight, counts: the loss weight and the counts of the global batch, valid after `check`. groups: this rank's
    groups, by axis. store: the gradient store, which knows the trained parameters; None for an evaluation.
    """

    def __init__(self, groups: Groups, store: GradientStore | None = None) -> None:
        self.groups = groups
        self.store = store
        self.reduction = Reduction(groups, StepState()) if store is None else store.reduction
        self.weight = 0.0
        self.counts = NO_COUNTS
        self._control = groups["control"]
        self._facts: list[dict[str, FactView]] = []
        self._refusal: RunError | None = None
        self._layout = -1
        self._trained: dict[str, FactView] = {}
        self._sum = torch.zeros(0, dtype=torch.float64)
        self._pending: Work | None = None

    def begin(self, label: str, batch: StepBatch | None = None, refusal: RunError | None = None) -> "RankAgreement":
        """Starts one asynchronous all-reduce over all ranks on the host, and returns this object. All ranks call this, and then
        `check`. label: the name of the work that begins, for errors. batch: this rank's samples, or None. Their weights are
        summed over all ranks, and their counts over the ranks that are first along `pp` and `sp`. refusal: the reason why this
        rank cannot begin, or None. If any ranks refuse, `check` raises the first refusal on all ranks.
        """
        terms = self.reduction.weight_terms(batch.weights if batch else ())
        self.weight = self.reduction.weight_from_terms(terms)
        self.counts = batch.counts if batch else NO_COUNTS
        self._refusal = refusal
        if not self._control.has_peers:
            return self
        num_microbatches = batch.num_microbatches if batch else 0
        self._facts = [
            {"all": (label, checksum([label]))},
            self._trained_facts(),
            dict.fromkeys(self.reduction.micro_axes, (num_microbatches, num_microbatches)),
            {} if batch is None else self._sample_views(batch),
        ]
        is_first = all(self.groups[axis].coord == 0 for axis in ("pp", "sp"))
        counts = self.counts if is_first else NO_COUNTS
        self._sum = torch.tensor([0.0] * _REFUSALS + [float(refusal is not None), *counts, *terms], dtype=torch.float64)
        for index, fact in enumerate(self._facts):
            self._sum[index] = sum(difference_term(self.groups[axis], number) for axis, (_, number) in fact.items())
        # All ranks call this: every step and every evaluation begins with this exchange between the hosts.
        self._pending = self._control.all_reduce(self._sum, label=f"the agreement before {label}")
        return self

    def check(self) -> None:
        """Waits for the sum that `begin` started, and sets `weight` and `counts`. Raises the same RunError on all ranks:
        `ranks-differ` if the ranks do not agree, else the first refusal, if there is one.
        """
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
        self.weight = self.reduction.weight_from_terms(self._sum[_WEIGHT:].tolist())
        self.counts = BatchCounts(*self._sum[_COUNTS:_WEIGHT].tolist())

    def _trained_facts(self) -> dict[str, FactView]:
        """Returns, for each axis, the trained parameters on which the ranks along it must agree; {} without a store."""
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

    def _sample_views(self, batch: StepBatch) -> dict[str, FactView]:
        """Returns, for `pp` and `sp`, the dtypes and shapes of the batch's fields, and a checksum that also covers the first
        and last `_END_BYTES` bytes of each field. The ranks along these axes must agree on both. Omits axes with one rank.
        """
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
        """Returns the same error `ranks-differ` on all ranks, about the first fact that differs. A collective on `control`."""
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


def _mismatch_message(fact: int, views: Mapping[int, FactView]) -> str:
    """Returns a text that says how two ranks differ in `fact`. views: each rank's view of the fact, not all equal."""
    (rank, *_), peer = _odd_and_usual_ranks({rank: number for rank, (_, number) in views.items()})
    rank_value, peer_value = views[rank][0], views[peer][0]
    if fact == CALL:
        return f"rank {rank} starts {rank_value}, but rank {peer} starts {peer_value}"
    if fact == MICROBATCHES:
        return f"rank {rank} runs {rank_value} microbatches in this step, but rank {peer} runs {peer_value}"
    if fact == BATCH:
        pairs = zip_longest(rank_value, peer_value, fillvalue="none")
        rank_field, peer_field = next(((left, right) for left, right in pairs if left != right), ("", ""))
        if not rank_field:
            return f"rank {rank} and rank {peer} received different samples"
        return f"rank {rank} received the batch field {rank_field}, but rank {peer} received {peer_field}"
    differing = [name for name in (*rank_value, *peer_value) if (name in rank_value) != (name in peer_value)]
    if not differing:
        return f"rank {rank} and rank {peer} reduce their gradients in different orders or in different buffers"
    trains, freezes = (rank, peer) if differing[0] in rank_value else (peer, rank)
    suffix = f" ({len(differing) - 1} more parameters differ)" if len(differing) > 1 else ""
    return f"{differing[0]} is trained on rank {trains}, but frozen on rank {freezes}{suffix}"


def _odd_and_usual_ranks(values: Mapping[int, Any]) -> tuple[list[int], int]:
    """Returns the ranks whose value is not the most common one, and the first rank that has the most common value."""
    usual_value, _ = Counter(values.values()).most_common(1)[0]
    odd_ranks = [rank for rank, value in values.items() if value != usual_value]
    return odd_ranks, next(rank for rank, value in values.items() if value == usual_value)


def check_agreement(
    facts: Mapping[str, str], control: Group, parts: Mapping[str, Callable[[], Mapping[str, str]]] = MappingProxyType({})
) -> None:
    """Compares `facts`, such as the plan's digest, over all ranks. A blocking collective on `control`. parts: for some facts, a
    function that returns the fact's parts; it is called only if ranks differ. Raises RunError `ranks-disagree` on all ranks;
    the message names the fact, a rank in the minority, and both values.
    """
    values_of_ranks = control.gather_objects(dict(facts), label="the values that all ranks compare")
    for name in facts:
        values = {rank: str(view.get(name)) for rank, view in zip(control.ranks, values_of_ranks, strict=True)}
        odd_ranks, usual_rank = _odd_and_usual_ranks(values)
        if not odd_ranks:
            continue
        odd_rank, usual_value = odd_ranks[0], values[usual_rank]
        suffix = f" (and {len(odd_ranks) - 1} more)" if len(odd_ranks) > 1 else ""
        message = f"rank {odd_rank}{suffix} has {name} {values[odd_rank]}, but rank {usual_rank} has {usual_value}"
        if name in parts:
            # All ranks get here, since they compare the same values.
            all_parts = control.gather_objects(dict(parts[name]()), label=f"the parts of {name}")
            parts_of = dict(zip(control.ranks, all_parts, strict=True))
            if differences := describe_differences(parts_of[odd_rank], parts_of[usual_rank]):
                thing = name.removeprefix("the ")
                message = f"rank {odd_rank}{suffix} has a different {thing} from rank {usual_rank}: {differences}"
        raise RunError("ranks-disagree", message, hint="install the same versions and use the same plan on every node")


def describe_differences(actual: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """Returns a text that names up to three parts whose values differ, with both values; "" if all values are equal."""
    names = [name for name in {**actual, **usual} if actual.get(name) != usual.get(name)]
    return shorten_names([f"`{name}` is {actual.get(name, 'unset')}, not {usual.get(name, 'unset')}" for name in names], 3)


Exchanges = dict[str, ExchangeSummary]
"""Summaries of the exchanges that a rank has logged in a step (see `ExchangeLog`), by the label of the group."""

_NO_EXCHANGES = ((), 0, 0, "")  # an `ExchangeSummary` of an empty log


def difference_term(group: Group, number: int) -> int:
    """Returns this rank's term of a sum over all ranks that is 0 if the ranks of `group` have the same `number`. If numbers
    differ, the sum is 0 only with a probability of 2^-32. The term is an integer of magnitude below 2^32 x the group's size,
    and float64 sums are exact below 2^53. The hash includes the group, so that differences in two groups do not cancel.
    """
    digest = blake2b(f"{group.axis} {group.ranks[0]} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") * (group.size - 1 if group.ranks[0] == group.rank else -1)


def collect_exchanges(groups: Iterable[Group]) -> Exchanges:
    """Returns a summary of this rank's logged exchanges for each group that has any, by the label of the group."""
    # This runs in every step, so long labels are built only for groups with exchanges.
    return {str(group): exchanged for group in groups if (exchanged := group.exchange_log.summarise(group.ranks)) is not None}


def exchange_difference(groups: Iterable[Group]) -> int:
    """Returns this rank's term of a sum over all ranks that is 0 if the ranks of each group made the same exchanges."""
    summaries = ((group, group.exchange_log.summarise(group.ranks)) for group in groups)
    return sum(difference_term(group, summary.checksum) for group, summary in summaries if summary is not None)


def exchange_mismatch_error(when: str, local_exchanges: Exchanges, control: Group) -> RunError:
    """Returns the same `ranks-differ` error on all ranks. It names the first group in which ranks made different exchanges, and
    two such ranks. A blocking collective on `control`. when: the name of the step. local_exchanges: this rank's exchanges.
    """
    views = control.gather_objects(local_exchanges, label="the collectives of all ranks")
    groups: dict[str, Sequence[int]] = {label: exchanged[0] for view in views for label, exchanged in view.items()}
    for label, ranks in groups.items():
        by_rank = {rank: tuple(views[rank].get(label, _NO_EXCHANGES))[1:] for rank in ranks}
        odd_ranks, usual_rank = _odd_and_usual_ranks(by_rank)
        if odd_ranks:
            odd, usual = (f"rank {rank} ran {_format_exchanges(by_rank[rank])}" for rank in (odd_ranks[0], usual_rank))
            message = f"{when}: in {label}, {odd}, but {usual}"
            return RunError("ranks-differ", message, hint=MISMATCH_HINT)
    raise AssertionError(f"all ranks made the same exchanges: {views}")


def _format_exchanges(exchanged: Sequence[Any]) -> str:
    """Returns a text about `exchanged`: the number of exchanges, their checksum and the label of the last one."""
    times, _, last = exchanged
    return f"{times} collectives, the last of them {last}" if times else "none"


class CopyComparison:
    """Checks that ranks' copies of weights and buffers are equal. per_rank_buffers: patterns of buffers that may differ."""

    def __init__(self, parts: Parts, per_rank_buffers: Sequence[str] = ()) -> None:
        self.parts = parts
        self.per_rank_buffers = per_rank_buffers
        self._is_first = True

    def __call__(self) -> None:
        """Waits for the last step, and compares fingerprints of the values by blocking collectives. All ranks call this. If
        values differ, raises the same RunError `ranks-differ` on all ranks, which names the values and two ranks.
        """
        is_first, self._is_first = self._is_first, False
        parts = self.parts
        if not is_first:
            parts.weights.settle()
            for layer in parts.layers:
                parts.waits.wait_for(layer.name)
        label = "first values" if is_first else "values"
        faults = []
        # The ranks of a stage, or of a tie, hold the same parameters. All ranks take the axes in one order, so none deadlocks.
        for axis, values in sorted(self._values_by_axis().items()):
            fingerprints = torch.stack([fingerprint(value) for value in values.values()])
            faults.append(_compare_fingerprints(label, [*values], fingerprints, parts.groups[axis]))
        # All ranks must raise: ranks of other groups would otherwise wait for those that stop.
        all_faults = parts.groups["control"].gather_objects(faults, label=f"{label} that differ")
        if fault := next((fault for faults in all_faults for fault in faults if fault), ""):
            hint = "write the same values on all ranks, and draw an optimizer's random numbers from torch's generator"
            if is_first:
                hint = "draw random numbers only from torch's generator, `random` or numpy, and load weights on every rank"
            raise RunError("ranks-differ", fault, hint=hint)

    def _values_by_axis(self) -> dict[str, dict[str, Tensor]]:
        """Returns, for each axis, the weights and buffers that all ranks along it hold, by name, in one order on all ranks."""
        groups, values = self.parts.groups, defaultdict[str, dict[str, Tensor]](dict)
        for param in sorted(self.parts.registry, key=lambda param: param.name):
            for axis in (param.reduce_group, param.tie_axis):
                if axis is not None and groups[axis].size > 1 and param.numel:
                    values[axis][param.name] = param.parameter.detach()
        for layer in self.parts.layers if groups["stage"].size > 1 else ():
            for name, buffer in layer.module.named_buffers(layer.name):
                if buffer.numel() and not matches_any(name, self.per_rank_buffers):
                    values["stage"][name] = buffer
        return values


def _compare_fingerprints(label: str, names: Sequence[str], fingerprints: Tensor, group: Group) -> str:
    """Returns a text with two ranks of `group` whose `fingerprints`, int64 [len(names)], differ, and the names of these values;
    "" if all ranks agree. A blocking collective over `group`.
    """
    extremes = torch.stack([fingerprints, ~fingerprints])  # the maximum of ~x is ~(the minimum of x)
    group.all_reduce(extremes, "max", label=f"the fingerprints of {label}").wait()
    is_odd = extremes[0] != ~extremes[1]
    if not is_odd.any():
        return ""
    differing = [name for name, differs in zip(names, is_odd.tolist(), strict=True) if differs]
    local_print = fingerprints[is_odd][:1].contiguous()
    all_prints = local_print.new_empty(group.size)
    group.all_gather(all_prints, local_print, label="the fingerprints that differ").wait()
    other_rank = next(rank for rank, value in zip(group.ranks, all_prints.tolist(), strict=True) if value != int(all_prints[0]))
    return f"{label} differ between rank {group.ranks[0]} and rank {other_rank}: {shorten_names(differing)}"


COMPARE_EVERY = 256
"""The number of steps between two checks. One check compares the copies of weights and buffers that different ranks hold, and
the other compares the values of a layer's weights and buffers before and after a call of the layer.
"""


class _TensorSlot(NamedTuple):
    """A parameter or buffer of `module`: `values[key]`, in `_parameters` or `_buffers`. name: the path in the model."""

    name: str
    module: nn.Module
    values: Mapping[str, Tensor | None]
    key: str
    is_buffer: bool


class _LayerSnapshot(NamedTuple):
    """The watched tensors of a layer. states: the version counter of each, and a hash of its values if `compares_values`."""

    tensors: list[Tensor | None]
    states: list[tuple[int, int]] | list[int]
    compares_values: bool


class WriteWatch:
    """Finds writes to buffers and weights in forwards. Refuses writes to buffers, unless their names match a pattern of
    `per_rank_buffers`, and writes to weights unless one process would write the same values.
    """

    def __init__(self, parts: Parts, per_rank_buffers: Sequence[str] = ()) -> None:
        self._has_one_replica = parts.groups["stage"].size == 1
        self._has_masters = parts.precision.compute in ("bf16", "fp16")
        self._params_by_id = {id(param.parameter): param for param in parts.registry}
        self._per_rank_buffers = per_rank_buffers
        self._slots_of_layer: dict[str, list[_TensorSlot]] = {}
        self._first_steps: dict[str, int] = {}
        self._writers: dict[str, str] = {}

    def begin_call(self, layer: Layer, micro: MicroStep) -> _LayerSnapshot | None:
        """Returns a snapshot of `layer` before its call for `micro`; None after its first step, except for microbatch 0."""
        is_first_call = layer.name not in self._slots_of_layer
        if is_first_call:
            self._slots_of_layer[layer.name] = list(self._list_slots(layer))
            self._first_steps[layer.name] = micro.step
        elif micro.micro and micro.step > self._first_steps[layer.name]:
            return None
        compares_values = is_first_call or (not micro.micro and micro.step % COMPARE_EVERY == COMPARE_EVERY - 1)
        return self._snapshot(layer, compares_values=compares_values)

    def check(self, layer: Layer, before: _LayerSnapshot | None) -> None:
        """Raises RunError "weight-written" or PlanError "model-buffer-written" for a refused write since `begin_call`."""
        if before is None:
            return
        after = self._snapshot(layer, compares_values=before.compares_values)
        if after.states == before.states and all(map(is_, after.tensors, before.tensors)):
            return
        rows = zip(self._slots_of_layer[layer.name], *before[:2], *after[:2], strict=True)
        written_slots = [slot for slot, old, old_state, new, state in rows if new is not old or state != old_state]
        for slot in written_slots:
            if not slot.is_buffer:
                self._check_weight_write(layer, slot)
        check_written_buffers([(slot.name, slot.module) for slot in written_slots if slot.is_buffer])

    def _snapshot(self, layer: Layer, *, compares_values: bool) -> _LayerSnapshot:
        tensors = [slot.values.get(slot.key) for slot in self._slots_of_layer[layer.name]]
        versions = [0 if tensor is None else version_of(tensor) for tensor in tensors]
        states = list(zip(versions, map(_fingerprint, tensors), strict=True)) if compares_values else versions
        return _LayerSnapshot(tensors, states, compares_values)

    def check_rerun(self, layer: Layer) -> None:
        """Raises RunError "weight-written" if `layer` has written a weight. Called when the backward recomputes the layer."""
        if layer.name in self._writers:
            reason = "it would be written again when the backward recomputes the forward"
            raise _weight_written_error(layer, self._writers[layer.name], reason)

    def _check_weight_write(self, layer: Layer, slot: _TensorSlot) -> None:
        """Records a write to a weight. Raises RunError "weight-written" if one process would not write the same values."""
        parameter = slot.values[slot.key]
        param: Param | None = self._params_by_id.get(id(parameter))
        reason = None
        if not self._has_one_replica:
            reason = "each replica would write values from its own samples"
        elif param is not None and param.tie_axis is not None:
            reason = "other stages have a copy that would not change"
        elif self._has_masters and parameter is not None and parameter.requires_grad:
            reason = "the optimizer updates an fp32 copy that would not change"
        if reason is not None:
            raise _weight_written_error(layer, slot.name, reason, slot.module)
        self._writers[layer.name] = slot.name

    def _list_slots(self, layer: Layer) -> Iterable[_TensorSlot]:
        """Yields the slots of the layer's unsharded parameters, and of the buffers that it must not write."""
        for name, module in layer.module.named_modules(prefix=layer.name):
            for values, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for key, tensor in values.items():
                    path = f"{name}.{key}"
                    is_ignored = isinstance(tensor, StandIn) or (is_buffer and matches_any(path, self._per_rank_buffers))
                    if tensor is not None and not is_ignored:
                        yield _TensorSlot(path, module, values, key, is_buffer)


def check_fields(layers: Sequence[Layer], fields: Mapping[str, Tensor], before: Sequence[int]) -> None:
    """Raises RunError "field-written" if `layers` have written to a batch field. before: the fields' initial versions."""
    for (name, field), version in zip(fields.items(), before, strict=True):
        if version_of(field) != version:
            readers = ", ".join(layer.name for layer in layers if name in layer.fields) or "no layer of this stage"
            message = (
                f"a layer writes in place to the batch field {name!r} (passed to {readers}), but other stages have "
                "their own copies of the field"
            )
            hint = "compute the values in the dataset, or write to a `clone()` that the layer returns"
            raise RunError("field-written", message, hint=hint)


@torch.no_grad()
def _fingerprint(tensor: Tensor | None) -> int:
    """Returns the hash of the values of `tensor`, for which it waits, or 0 if there are none."""
    return 0 if tensor is None or tensor.is_meta else int(fingerprint(tensor.detach()))


def _weight_written_error(layer: Layer, name: str, reason: str, module: nn.Module | None = None) -> RunError:
    hint = "write the weight between two steps, under `torch.no_grad()`"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        hint = "remove `max_norm`, and scale the rows after the lookup"
    message = f"the forward of the layer {layer.name!r} writes to the weight {name!r}, but {reason}"
    return RunError("weight-written", message, hint=hint)
