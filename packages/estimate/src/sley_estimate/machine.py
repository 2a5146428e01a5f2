"""Reads and formats the machine file, which `train-cli calibrate` writes, and computes the costs of exchanges and copies from
its figures. Imports no torch.

Units are seconds, bytes and FLOPs; bandwidths are in bytes per second. Each number has limits that no real machine exceeds, so
most mistakes, such as milliseconds instead of seconds or a wrong sign, raise an error.

Rank r is on host r // ranks_per_host. Collectives except all-to-alls are rings: each of n ranks sends n - 1 of n parts of the
tensor, and sends them twice in an all-reduce. On each host, a ring between hosts uses the network cards of all its ranks there,
or shares one card with the rings of the other groups. In an all-to-all, ranks send directly to each peer. All groups of an axis
exchange at the same time, and the slowest one determines the cost.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tomli_w
from pydantic import Field, ValidationError

from sley_core.errors import PlanError
from sley_core.plan.document import Document, read_file, read_tables, sort_by_place, to_plain_data
from sley_core.plan.load import validation_diagnostics
from sley_core.protocols import Collective
from sley_core.table import Array, Table, ValueDescription
from sley_core.topology import AXES, TIE_PREFIX, Topology

MACHINE_FORMAT = 1  # the version of the format of machine files
CopyDirection = Literal["to_host", "to_device"]
Bandwidth = Annotated[float, Field(ge=1e3, le=1e15), ValueDescription("bytes per second, from 1e3 to 1e15")]
Latency = Annotated[float, Field(ge=0, le=10), ValueDescription("seconds, from 0 to 10")]
Rate = Annotated[float, Field(ge=1e6, le=1e17), ValueDescription("floating-point operations per second, from 1e6 to 1e17")]
Seconds = Annotated[float, Field(ge=0, le=1e5), ValueDescription("seconds, from 0 to 100,000")]


class MatmulTable(Table):
    """The speed of matrix products in one dtype: a product of n FLOPs takes (n + half_flops) / flops_per_s seconds."""

    flops_per_s: Rate
    """The measured rate that large products approach, not the peak in a datasheet."""

    half_flops: Annotated[float, Field(ge=0, le=1e15), ValueDescription("FLOPs, from 0 to 1e15")] = 0.0
    """The FLOPs of a product that runs at half of `flops_per_s`. Smaller products run slower, as they do not fill the device.
    """


class MatmulsTable(Table):
    """The speed of matrix products by the dtype of their inputs, as in `[device.matmul.bf16]`; None if not measured."""

    fp64: MatmulTable | None = None
    fp32: MatmulTable | None = None  # includes the effect of TF32 where torch uses it
    bf16: MatmulTable | None = None
    fp16: MatmulTable | None = None


class DeviceTable(Table):
    """The device of a rank."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """The name printed with estimates."""

    kind: Literal["cpu", "cuda"]
    """With `"cuda"`, the host launches kernels ahead of the device, and a step takes as long as the slower of the two. With
    `"cpu"`, the times to launch and to run an operator add up.
    """

    memory: Annotated[int, Field(ge=10**6, le=10**14), ValueDescription("bytes, from 1e6 to 1e14")] | None = None
    """The device's memory in bytes. It is the limit of `train-cli estimate --machine` without `--memory`."""

    memory_bandwidth: Bandwidth
    """Bytes per second, counting both the reads and the writes of an operator."""

    launch_s: Annotated[float, Field(ge=0, le=0.1), ValueDescription("seconds, from 0 to 0.1")]
    """The time in seconds that the host needs to launch one operator."""

    matmul: MatmulsTable
    """The speed of matrix products by dtype."""


class ExchangeTable(Table):
    """The speed of one kind of exchange over a link."""

    latency_s: Latency
    """The fixed time in seconds of one message, one all-to-all or one round of a ring, whatever its size."""

    bandwidth: Bandwidth
    """Bytes per second that a rank sends while it receives at the same rate. If the link is `shared`, this is the total of all
    ranks of a host.
    """

    overlap: Annotated[float, Field(ge=0, le=1), ValueDescription("a share, from 0 to 1")] = 1.0
    """The share of an exchange's time that can overlap with computing. During the rest of the time, a waiting rank itself works
    on the exchange. The share is 0 if ranks read each other's memory, and below 1 if the threads that send messages need cores
    that compute.
    """


class LinkTable(ExchangeTable):
    """A link between ranks. Its own figures apply to every kind of exchange whose table is None."""

    shared: bool = False
    """Whether all ranks of a host share the bandwidth, as with one network card."""

    send: ExchangeTable | None = None
    """Messages between pipeline stages."""

    sum: ExchangeTable | None = None
    """All-reduces."""

    gather: ExchangeTable | None = None
    """All-gathers."""

    reduce: ExchangeTable | None = None
    """Reduce-scatters."""

    swap: ExchangeTable | None = None
    """All-to-alls."""


class LinksTable(Table):
    """The links between ranks. An estimate that needs a missing link raises PlanError "machine-links"."""

    same_host: LinkTable | None = None
    """The link between ranks of one host."""

    other_host: LinkTable | None = None
    """The link between ranks of different hosts."""

    ranks_per_host: Annotated[int, Field(ge=1, le=1024)] = 8
    """The number of ranks on one host. Rank r is on host r // ranks_per_host."""


class HostTable(Table):
    """The speed of copies between device and host, and of an optimizer on the host."""

    to_host: Bandwidth
    """Bytes per second of copies from the device."""

    to_device: Bandwidth
    """Bytes per second of copies to the device."""

    latency_s: Latency = 0.0
    """The fixed time in seconds of a copy, whatever its size."""

    memory_bandwidth: Bandwidth | None = None
    """Bytes per second, counting both the reads and the writes of an operator on the host's cores. It is needed only to
    estimate an optimizer on the host of a CUDA device.
    """


class EngineTable(Table):
    """The host's time outside the layers in a step with clipping and AdamW, if the host runs ahead of its device."""

    step_s: Latency
    """The time in seconds per step that does not depend on the size of the step."""

    parameter_s: Latency
    """Seconds per step for each trained parameter tensor of the rank."""

    micro_s: Latency
    """Seconds per microbatch, without its gradients."""

    gradient_s: Latency
    """Seconds per microbatch for each trained parameter tensor of the rank."""

    def step_seconds(self, num_trained: int, num_microbatches: int) -> float:
        """Returns the host's time in seconds for a step with `num_microbatches` microbatches and `num_trained` parameters."""
        microbatch_s = self.micro_s + self.gradient_s * num_trained
        return self.step_s + self.parameter_s * num_trained + microbatch_s * num_microbatches


class LayerTable(Table):
    """The measured time of one distinct layer on one microbatch, under one activation policy."""

    key: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$"), ValueDescription("16 hexadecimal digits")]
    """A digest of everything that determines the layer's cost, such as its class, settings, shapes and policy."""

    name: str
    """The name of the first layer of the model with this key."""

    forward: Seconds
    """The time of the forward in seconds."""

    backward: Seconds
    """The time of the whole backward in seconds, with recomputation."""

    input_gradient: Seconds
    """The time of the first half of a split backward in seconds, with recomputation."""

    weight_gradient: Seconds
    """The time in seconds of the second half of a split backward, which computes the gradients of the weights."""

    host_forward: Seconds = 0.0
    """The time in seconds that the host needs to launch the forward, or 0 if the host does not run ahead of the device. The
    next three fields are the times for the backward and its halves, without the accumulation of gradients.
    """

    host_backward: Seconds = 0.0
    host_input_gradient: Seconds = 0.0
    host_weight_gradient: Seconds = 0.0

    output_bytes: Annotated[int, Field(ge=0, le=10**13), ValueDescription("bytes, from 0 to 1e13")]
    """The size of the layer's output in bytes."""

    activations: str | None = None
    """The activation policy under which the layer was measured, with the policy's options."""

    micro_size: Annotated[int, Field(ge=1)] | None = None
    """The number of samples in the microbatch."""


class MachineFile(Table):
    """The contents of a machine file."""

    format: Literal[1]
    """The version of the file format."""

    device: DeviceTable
    """The device of each rank."""

    links: LinksTable = Field(default_factory=LinksTable)
    """The links between ranks."""

    host: HostTable | None = None
    """Copies between device and host."""

    engine: EngineTable | None = None
    """The host's time outside the layers. `train-cli calibrate` omits it on a CPU."""

    layers: Array[LayerTable] = ()
    """The measured layers. The time of any other layer is computed from its operators. If the list contains the layer with
    another policy or microbatch size, the computed time is scaled by that measurement.
    """


def load_machine(path: str | Path) -> MachineFile:
    """Returns the machine that the file at `path` describes. Raises PlanError, with the line of the fault: "machine-unreadable"
    or "syntax" for a file that cannot be read as TOML, and "missing-key", "unknown-key", "out-of-range", "wrong-type" or
    "wrong-value" for a wrong key or value.
    """
    try:
        document = read_file(path)
    except PlanError as error:
        hint = "use `train-cli calibrate --out machine.toml` to write one"
        raise PlanError.from_diagnostics(
            replace(diagnostic, code=diagnostic.code.replace("plan-", "machine-", 1), hint=hint)
            for diagnostic in error.diagnostics
        ) from None
    return _validate_machine(document)


def machine_from_dict(tables: Mapping[str, Any]) -> MachineFile:
    """Returns the machine that plain data describes. Raises PlanError, as `load_machine` does, for a wrong key or value."""
    return _validate_machine(read_tables(tables))


def machine_text(machine: MachineFile) -> str:
    """Returns `machine` as the TOML text of a machine file, from which `load_machine` reads an equal machine."""
    return tomli_w.dumps(to_plain_data(machine))


def _validate_machine(document: Document) -> MachineFile:
    try:
        return MachineFile.model_validate(document.tables)
    except ValidationError as error:
        problems = validation_diagnostics(error, MachineFile, document.tables, (), document, "the machine file")
        raise PlanError.from_diagnostics(sort_by_place(problems)) from None


Ranks = Sequence[int]


class Cost(NamedTuple):
    """The parts of an exchange's time in seconds: the latency, the transfer of the bytes over idle links, and the work of each
    waiting rank. The sum of the parts is the time of the exchange if no computation overlaps with it.
    """

    latency_s: float
    transfer_s: float
    member_work_s: float = 0.0

    def split_overlap(self, share: float) -> "Cost":
        """Returns the cost if only `share` of the time can overlap with computing. `member_work_s` then includes the rest."""
        exposed_s = (1 - share) * (self.latency_s + self.transfer_s)
        return Cost(self.latency_s * share, self.transfer_s * share, self.member_work_s + exposed_s)


NO_COST = Cost(0.0, 0.0)  # the cost of an exchange in a group of one rank


@lru_cache(maxsize=64)  # groups may have thousands of ranks
def count_hosts(ranks: range | tuple[int, ...], ranks_per_host: int) -> tuple[int, int]:
    """Returns the number of hosts on which `ranks` run, and the largest number of these ranks on one host."""
    hosts = Counter(rank // ranks_per_host for rank in ranks)
    return len(hosts), max(hosts.values())


def collective_cost(collective: Collective, num_bytes: int, ranks: Ranks, links: LinksTable) -> Cost:
    """Returns the cost of a collective of the global ranks `ranks`, while the other ranks of their hosts run the same
    collective in their own groups. num_bytes: the size of the full tensors. Raises PlanError "machine-links" for a missing
    link.
    """
    size = len(ranks)
    if size == 1:
        return NO_COST
    num_hosts, per_host = count_hosts(ranks if isinstance(ranks, range) else tuple(ranks), links.ranks_per_host)
    is_swap, rounds = collective == "swap", (2 if collective == "sum" else 1) * (size - 1)
    link_costs: list[tuple[Cost, float]] = []  # cost and overlap of each link
    if per_host > 1:
        link, table = _require_link(links, "same_host", collective)
        share = (per_host - 1 if is_swap else rounds) / size * (links.ranks_per_host if link.shared else 1)
        link_costs.append((Cost(table.latency_s, num_bytes * share / table.bandwidth), table.overlap))
    if num_hosts > 1:
        link, table = _require_link(links, "other_host", collective)
        if is_swap:
            share = (size - per_host) / size * (links.ranks_per_host if link.shared else 1)
        else:
            share = rounds / size * (max(1, links.ranks_per_host // per_host) if link.shared else 1 / per_host)
        link_costs.append((Cost(table.latency_s, num_bytes * share / table.bandwidth), table.overlap))
    slowest_link, overlap = max(link_costs, key=lambda link_cost: link_cost[0].transfer_s)
    latency_s = max(cost.latency_s for cost, _ in link_costs) * (1 if is_swap else rounds)
    return Cost(latency_s, slowest_link.transfer_s).split_overlap(overlap)


def message_cost(num_bytes: int, sender: int, receiver: int, links: LinksTable) -> Cost:
    """Returns the cost of a message while all ranks of its host send. Raises PlanError "machine-links" for a missing link."""
    is_local = sender // links.ranks_per_host == receiver // links.ranks_per_host
    link, table = _require_link(links, "same_host" if is_local else "other_host", "send")
    cost = Cost(table.latency_s, num_bytes * (links.ranks_per_host if link.shared else 1) / table.bandwidth)
    return cost.split_overlap(table.overlap)


def _require_link(links: LinksTable, name: Literal["same_host", "other_host"], kind: str) -> tuple[LinkTable, ExchangeTable]:
    """Returns the link `name` and its figures for exchanges of `kind`. Raises PlanError "machine-links" for a missing link."""
    link: LinkTable | None = getattr(links, name)
    if link is not None:
        return link, getattr(link, kind) or link
    if name == "same_host":
        reason, hint = "ranks of one host exchange tensors", "use `train-cli calibrate --ranks 2` to measure it"
    else:
        reason = f"with {links.ranks_per_host} ranks per host, ranks exchange tensors between hosts"
        hint = "add this table with the link's latency and bandwidth, or increase `ranks_per_host`"
    raise PlanError("machine-links", f"the machine file has no `[links.{name}]`, but {reason}", hint=hint)


@lru_cache(maxsize=1024)
def concurrent_groups(topology: Topology, axis: str, ranks_per_host: int, ranks: tuple[int, ...] | None = None) -> list[Ranks]:
    """Returns groups of `axis` that exchange at the same time, but only one of the groups whose ranks are distributed over
    hosts in the same way. ranks: one of the groups; the result then contains only groups of its stage. None means the groups of
    all stages. If `axis` belongs to a plugin, the other groups are unknown, and the result contains only `ranks`.
    """
    groups: Iterable[Ranks] = [ranks] if ranks else topology.partition(axis)
    if ranks:
        stage, offset = divmod(min(ranks), topology.ranks_per_stage)
        if axis in AXES:
            groups = [ranks, *topology.partition(axis, stage)]
        elif axis.startswith(TIE_PREFIX):
            groups = [ranks, *([rank + index - offset for rank in ranks] for index in range(topology.ranks_per_stage))]
    by_hosts: dict[tuple[int, ...], Ranks] = {}
    for group in groups:
        by_hosts.setdefault(tuple(sorted(Counter(rank // ranks_per_host for rank in group).values())), group)
    return list(by_hosts.values())


def slowest_cost(
    collective: Collective,
    num_bytes: int,
    topology: Topology,
    axis: str,
    links: LinksTable,
    ranks: tuple[int, ...] | None = None,
) -> Cost:
    """Returns the cost of a collective in the slowest of `concurrent_groups`. May raise PlanError "machine-links"."""
    groups = concurrent_groups(topology, axis, links.ranks_per_host, ranks)
    return max((collective_cost(collective, num_bytes, group, links) for group in groups), key=sum)


def slowest_message_cost(num_bytes: int, stages: tuple[int, int], topology: Topology, links: LinksTable) -> Cost:
    """Returns the cost of the slowest message between two `stages`. Raises PlanError "machine-links" for a missing link."""
    size, per_host = topology.ranks_per_stage, links.ranks_per_host
    firsts = [stage * size for stage in stages]
    pairs = {
        (sender // per_host == receiver // per_host): (sender, receiver)
        for sender, receiver in zip(*(range(first, first + min(size, per_host)) for first in firsts), strict=True)
    }
    return max((message_cost(num_bytes, *pair, links) for pair in pairs.values()), key=sum)


def copy_cost(direction: CopyDirection, num_bytes: int, machine: MachineFile) -> Cost:
    """Returns the cost of a copy to the host or to the device. Without `[host]` in the machine file, a CPU copies at its memory
    bandwidth, and a CUDA device raises PlanError "machine-host".
    """
    host = machine.host
    if host is not None:
        return Cost(host.latency_s, num_bytes / (host.to_host if direction == "to_host" else host.to_device))
    if machine.device.kind == "cuda":
        raise missing_host_error("[host]", "a step copies data between the device and its host")
    return Cost(machine.device.launch_s, 2 * num_bytes / machine.device.memory_bandwidth)


def missing_host_error(key: str, reason: str) -> PlanError:
    """Returns the error for a machine file without the table or key `key`. reason: a clause that says why it is needed."""
    hint = "use `train-cli calibrate` on a machine with a CUDA device to measure it"
    return PlanError("machine-host", f"the machine file has no `{key}`, but {reason}", hint=hint)
