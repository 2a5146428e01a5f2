"""Checks that copies of a weight, buffer or batch field stay equal on all ranks, since replicas that diverge stay different.

A value that a forward writes differs between replicas, which see different samples, and is written once per microbatch and
recomputation. `WriteWatch` refuses such writes. It compares version counters before and after a layer, in all microbatches of
the first step and in the first microbatch of later steps. torch does not count some writes (`.data`, numpy, running
statistics), so hashes of the values are compared too, in a layer's first call and every `COMPARE_EVERY` steps.

`CopyComparison` compares values before the first step and every `COMPARE_EVERY` steps, on every rank that holds a copy:
parameters over their reduce group and, if several stages hold one, over its tie group; buffers over the stage. First values
differ if a model draws from a generator whose state differs between ranks; later values, if ranks write different values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sley_core.comm.world import Group
from sley_core.engine.parts import MicroStep, Parts
from sley_core.engine.registry import Param
from sley_core.engine.shards import StandIn
from sley_core.errors import RunError, shorten_names
from sley_core.model.build import check_written_buffers
from sley_core.model.layers import Layer
from sley_core.model.tensors import fingerprint, matches_any, version_of


class CopyComparison:
    """Compares the copies of weights and buffers on all ranks, except buffers that match a pattern of `per_rank_buffers`."""

    def __init__(self, parts: Parts, per_rank_buffers: Sequence[str] = ()) -> None:
        self.parts = parts
        self.per_rank_buffers = per_rank_buffers
        self._is_first = True

    def __call__(self) -> None:
        """Waits for the last step, and compares fingerprints of the values by blocking collectives. All ranks call this. Raises
        the same RunError `ranks-differ`, with the differing values and two ranks, on all ranks of the run.
        """
        is_first, self._is_first = self._is_first, False
        parts = self.parts
        if not is_first:
            parts.weights.settle()
            for layer in parts.layers:
                parts.waits.wait_for(layer.name)
        label = "first values" if is_first else "values"
        by_axis: dict[str, list[tuple[str, Tensor]]] = {}
        for name, value, axis in _replicated_values(parts, self.per_rank_buffers):
            by_axis.setdefault(axis, []).append((name, value))
        faults = []
        # The ranks of a stage, or of a tie, hold the same parameters. All ranks take the axes in one order, so none deadlocks.
        for axis in sorted(by_axis):
            names = [name for name, _ in by_axis[axis]]
            prints = torch.stack([fingerprint(value) for _, value in by_axis[axis]])
            faults.append(_compare_fingerprints(label, names, prints, parts.groups[axis]))
        # All ranks must raise: ranks of other groups would otherwise wait for those that stop.
        everyone = parts.groups["control"].gather_objects(faults, label="initial values that differ")
        if fault := next((fault for faults in everyone for fault in faults if fault), ""):
            hint = (
                "draw the model's random numbers only from torch's generator, `random` or numpy, and load weights on every rank"
                if is_first
                else "write the same values to weights and buffers on all ranks, and draw an optimizer's random "
                "numbers from torch's generator"
            )
            raise RunError("ranks-differ", fault, hint=hint)


def _replicated_values(parts: Parts, per_rank_buffers: Sequence[str]) -> Iterator[tuple[str, Tensor, str]]:
    """Yields the name, value and axis of each value that has copies on the ranks of the axis, equally ordered on all ranks."""
    for param in sorted(parts.registry, key=lambda param: param.name):
        for axis in (param.reduce_group, param.tie_axis):
            if axis is not None and parts.groups[axis].size > 1 and param.numel:
                yield param.name, param.parameter.detach(), axis
    for layer in parts.layers if parts.groups["stage"].size > 1 else ():
        for name, buffer in layer.module.named_buffers(layer.name):
            if buffer.numel() and not any(fnmatchcase(name, pattern) for pattern in per_rank_buffers):
                yield name, buffer, "stage"


def _compare_fingerprints(label: str, names: list[str], prints: Tensor, group: Group) -> str:
    """Compares fingerprints over `group`, whose ranks pass the same names. Blocks. Returns a text of the differences or ""."""
    extremes = torch.stack([prints, ~prints])  # the maximum of ~x is ~(the minimum of x)
    group.all_reduce(extremes, "max", label=f"the fingerprints of {label}").wait()
    is_odd = extremes[0] != ~extremes[1]
    if not is_odd.any():
        return ""
    differing = [name for name, differs in zip(names, is_odd.tolist(), strict=True) if differs]
    local_print = prints[is_odd][:1].contiguous()
    all_prints = local_print.new_empty(group.size)
    group.all_gather(all_prints, local_print, label="the fingerprints that differ").wait()
    other_rank = next(rank for rank, value in zip(group.ranks, all_prints.tolist(), strict=True) if value != int(all_prints[0]))
    return f"{label} differ between rank {group.ranks[0]} and rank {other_rank}: {shorten_names(differing)}"


COMPARE_EVERY = 256
"""The number of steps between two comparisons of values before and after layers, and of values between replicas."""


class _TensorSlot(NamedTuple):
    name: str
    module: nn.Module
    values: Mapping[str, Tensor | None]
    key: str
    is_buffer: bool


class _LayerSnapshot(NamedTuple):
    """The watched tensors of a layer. states: their versions, each paired with a hash of the values if `compares_values`."""

    tensors: list[Tensor | None]
    states: list[tuple[int, int]] | list[int]
    compares_values: bool


class WriteWatch:
    """Refuses writes of layers to buffers, and to weights if a single process would compute other values. per_rank_buffers:
    name patterns of the buffers that may be written.
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
        """Returns a snapshot of `layer`, or None if this call is not watched."""
        is_first_call = layer.name not in self._slots_of_layer
        if is_first_call:
            self._slots_of_layer[layer.name] = list(self._list_slots(layer))
            self._first_steps[layer.name] = micro.step
        elif micro.micro and micro.step > self._first_steps[layer.name]:
            return None
        compares_values = is_first_call or (not micro.micro and micro.step % COMPARE_EVERY == COMPARE_EVERY - 1)
        return self._snapshot(layer, compares_values=compares_values)

    def check(self, layer: Layer, before: _LayerSnapshot | None) -> None:
        """Raises RunError "weight-written" or PlanError "model-buffer-written" if `layer` has made a refused write. before: the
        result of `begin_call`.
        """
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
        """Raises RunError "weight-written" if `layer`, which runs again in the backward, has written a weight."""
        if layer.name in self._writers:
            raise _weight_written_error(
                layer, self._writers[layer.name], "it would be written again when the backward recomputes the forward"
            )

    def _check_weight_write(self, layer: Layer, slot: _TensorSlot) -> None:
        """Raises RunError "weight-written" unless a single process would write the same values as often."""
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
        """Yields the slots of the layer's unsharded parameters, and of its buffers that must not be written."""
        for name, module in layer.module.named_modules(prefix=layer.name):
            for values, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for key, tensor in values.items():
                    path = f"{name}.{key}"
                    is_ignored = isinstance(tensor, StandIn) or (is_buffer and matches_any(path, self._per_rank_buffers))
                    if tensor is not None and not is_ignored:
                        yield _TensorSlot(path, module, values, key, is_buffer)


def check_fields(layers: Sequence[Layer], fields: Mapping[str, Tensor], before: Sequence[int]) -> None:
    """Raises RunError "field-written" if `layers` have written a batch field in place. before: the versions of `fields` before
    the layers ran.
    """
    for (name, field), version in zip(fields.items(), before, strict=True):
        if version_of(field) != version:
            reader_names = [layer.name for layer in layers if name in layer.fields]
            raise RunError(
                "field-written",
                f"a layer writes in place to the batch field {name!r} (passed to "
                f"{', '.join(reader_names) or 'no layer of this stage'}), but other stages have their own unchanged "
                "copies",
                hint="compute the values in the dataset, or write to a `clone()` that the layer returns",
            )


@torch.no_grad()
def _fingerprint(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_meta else int(fingerprint(tensor.detach()))


def _weight_written_error(layer: Layer, name: str, reason: str, module: nn.Module | None = None) -> RunError:
    hint = "write it between two steps, under `torch.no_grad()`"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        hint = "remove `max_norm`, and scale the rows after the lookup"
    return RunError(
        "weight-written", f"the forward of the layer {layer.name!r} modifies the weight {name!r}, but {reason}", hint=hint
    )
