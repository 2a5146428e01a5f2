"""Loads full tensors into a run, by names that do not depend on the layout. Each rank copies its own part.

Every rank knows the names of the full model, so it can distinguish a misspelt name from a name of another stage. Ranks
exchange their faults and a checksum of each value, since replicas that load different values would stay different.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sley_core.engine.agreement import Agreement
from sley_core.engine.registry import ParameterRegistry
from sley_core.engine.save import modules_with_extra_state, set_extra_state
from sley_core.errors import RunError, format_cause
from sley_core.model.tensors import checksum

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts
    from sley_core.engine.weights import Masters
    from sley_core.model.layers import Layer

Pairs = Iterable[tuple[str, Tensor]]

_MAX_SHOWN = 4


class LoadedWeights(NamedTuple):
    """Lists the model's parameters that the state lacks (missing), and the state's names that the model lacks (unknown)."""

    missing: list[str]
    unknown: list[str]


@dataclass
class _LoadReport:
    """Holds one rank's faults, its unknown names, and the checksums of its values by name."""

    faults: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)


class ModelNames(NamedTuple):
    """The names of a full model. first: the registry's name by parameter name. buffers: buffers and extra states."""

    first: Mapping[str, str]
    buffers: set[str]


def collect_names(layers: Sequence[Layer]) -> ModelNames:
    first = {name: param.name for param in ParameterRegistry([layers]) for name in (param.name, *param.aliases)}
    buffers = {name for layer in layers for name, _ in layer.module.named_buffers(layer.name, True, False)}
    return ModelNames(first, buffers | {name for name, _ in modules_with_extra_state(layers)})


def load_weights(
    names: ModelNames, parts: Parts, masters: Masters, state: Mapping[str, Tensor] | Pairs, *, strict: bool
) -> LoadedWeights:
    """Loads `state` into this rank's `parts` of a model with these `names`, and into `masters`, as `Run.load_weights`
    describes. Every rank calls it, since it runs two blocking collectives over `control`.
    """
    Agreement(parts.groups).begin("loading weights").check()
    loading = _WeightLoader(names, parts, masters)
    if not isinstance(state, Mapping):
        loading.check_pairs(state, writes=True)
        return loading.exchange_reports(strict)
    loading.check_pairs(state.items())
    loaded = loading.exchange_reports(strict)
    for name, value in state.items():
        loading.write(name, value)
    return loaded


class _WeightLoader:
    """Holds the state of one call of `load_weights` on this rank."""

    def __init__(self, names: ModelNames, parts: Parts, masters: Masters) -> None:
        self.names = names
        self.masters = masters
        self.control = parts.groups["control"]
        self.params = {param.name: param for param in parts.registry}
        self.base = parts.registry.base
        self.buffers = {
            name: buffer for layer in parts.layers for name, buffer in layer.module.named_buffers(layer.name, True, False)
        }
        self.extra = dict(modules_with_extra_state(parts.layers))
        self.report = _LoadReport()
        self.received_names: set[str] = set()

    def check_pairs(self, pairs: Pairs, *, writes: bool = False) -> None:
        """Checks every pair, and with `writes` also writes the pairs before the first fault. Collects the faults."""
        try:
            for name, value in pairs:
                self._check_value(name, value)
                if writes and not self.report.faults:
                    self.write(name, value)
        except Exception as error:
            self.report.faults.append(f"the weights could not be read: {format_cause(error)}")

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Copies `value` into this rank's weight, weight shard or buffer of this name, if there is one."""
        param, buffer = self.params.get(self.names.first.get(name, name)), self.buffers.get(name)
        if param is not None:
            if param.name in self.base:
                self.base[param.name] = self.report.sums[param.name]
            local_value = value.detach() if param.shard is None else param.shard.cut(value.detach())
            self.masters.set(param, local_value)
        elif buffer is not None:
            buffer.copy_(value)
        elif name in self.extra:
            set_extra_state(self.extra[name], value)

    def exchange_reports(self, strict: bool) -> LoadedWeights:
        """Exchanges reports over all ranks, and returns missing and unknown names. Raises the same RunError on all ranks."""
        control = self.control
        missing = [name for name in self.params if name not in self.received_names]
        if strict:
            self.report.faults += [f"{name!r} is missing" for name in missing]
            self.report.faults += [f"{name!r} is unknown" for name in self.report.unknown]
        # over all ranks: each of them reaches this, even with faults
        reports = control.gather_objects([asdict(self.report), missing], label="the reports on loaded weights")
        reports_and_missing = [(_LoadReport(**report), names) for report, names in reports]
        faults = list(dict.fromkeys(line for report, _ in reports_and_missing for line in report.faults))
        if faults:
            suffix = f", and {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else ""
            message = f"these are not the weights of this model: {', '.join(faults[:_MAX_SHOWN])}{suffix}"
            raise RunError("weights-mismatch", message, hint="use the names of `run.registry`, or strict=False")
        sums: dict[str, tuple[int, int]] = {}
        for rank, (report, _) in zip(control.ranks, reports_and_missing, strict=True):
            for name, value in report.sums.items():
                known_checksum, first_rank = sums.setdefault(name, (value, rank))
                if known_checksum != value:
                    message = f"ranks {first_rank} and {rank} received different values of {name!r}"
                    raise RunError("weights-differ", message, hint="pass the same state on all ranks")
        all_missing = dict.fromkeys(name for _, names in reports_and_missing for name in names)
        unknown = dict.fromkeys(name for report, _ in reports_and_missing for name in report.unknown)
        return LoadedWeights(list(all_missing), list(unknown))

    def _check_value(self, name: str, value: Tensor) -> None:
        """Checks name, shape and dtype, and adds a checksum of the values to the report; `exchange_reports` compares them."""
        first = self.names.first.get(name, name)
        self.received_names.add(first)
        if name not in self.names.first and name not in self.names.buffers:
            self.report.unknown.append(name)
        param, buffer = self.params.get(first), self.buffers.get(name)
        if param is not None:
            shape = param.shape
        elif buffer is not None:
            shape = tuple(buffer.shape)
        else:
            return  # another stage holds it
        fault = ""
        if not isinstance(value, Tensor):
            fault = f"must be a tensor, but is a {type(value).__name__}"
        elif tuple(value.shape) != shape:
            fault = f"must have the shape {list(shape)}, but has {list(value.shape)}"
        elif param is not None and not value.is_floating_point():
            fault = f"must be floating-point, but is {value.dtype}"
        elif value.is_meta:
            fault = "is on meta and has no values"
        else:
            digest = checksum(value)
            if self.report.sums.setdefault(first, digest) != digest:
                fault = "has different values than the parameter that it is tied to"
        if fault:
            self.report.faults.append(f"{name!r} {fault}")
