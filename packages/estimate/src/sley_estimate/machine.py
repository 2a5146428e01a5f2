"""Defines, reads and writes the machine file. Units: seconds, bytes, FLOPs; a bandwidth is bytes per second.

Every figure has limits that no machine exceeds, so that typing errors (milliseconds for seconds, a sign) raise an error.
`train-cli calibrate` writes the file. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError

from sley_core.errors import PlanError
from sley_core.plan.document import Document, read_file, read_tables, sort_by_place, to_plain_data
from sley_core.plan.load import validation_diagnostics
from sley_core.table import Array, Table, ValueDescription

MACHINE_FORMAT = 1
Bandwidth = Annotated[float, Field(ge=1e3, le=1e15), ValueDescription("bytes per second, from 1e3 to 1e15")]
Latency = Annotated[float, Field(ge=0, le=10), ValueDescription("seconds, from 0 to 10")]
Rate = Annotated[float, Field(ge=1e6, le=1e17), ValueDescription("floating-point operations per second, from 1e6 to 1e17")]
Seconds = Annotated[float, Field(ge=0, le=1e5), ValueDescription("seconds, from 0 to 100,000")]


class MatmulTable(Table):
    """Products of one dtype: n FLOPs take (n + half_flops) / flops_per_s seconds."""

    flops_per_s: Rate
    """The rate of the largest products, not the peak in a datasheet."""

    half_flops: Annotated[float, Field(ge=0, le=1e15), ValueDescription("FLOPs, from 0 to 1e15")] = 0.0
    """FLOPs of a product that reaches half of that rate, since small products do not fill a device."""


class MatmulsTable(Table):
    """Products by the dtype of their inputs, `[device.matmul.bf16]`."""

    fp64: MatmulTable | None = None
    fp32: MatmulTable | None = None  # at the rate of tf32 if tensor cores use it
    bf16: MatmulTable | None = None
    fp16: MatmulTable | None = None


class DeviceTable(Table):
    """The device of a rank."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """The name printed with estimates."""

    kind: Literal["cpu", "cuda"]
    """On `"cuda"` the host launches kernels ahead of the device, and a step takes the maximum of both. On `"cpu"` both add up.
    """

    memory: Annotated[int, Field(ge=10**6, le=10**14), ValueDescription("bytes, from 1e6 to 1e14")] | None = None
    """Bytes of memory."""

    memory_bandwidth: Bandwidth
    """Bytes per second that an operator reads and writes in total."""

    launch_s: Annotated[float, Field(ge=0, le=0.1), ValueDescription("seconds, from 0 to 0.1")]
    """Seconds of the host to launch one operator."""

    matmul: MatmulsTable
    """The rates of products by dtype."""


class ExchangeTable(Table):
    """One kind of exchange over a link."""

    latency_s: Latency
    """Seconds from one rank to another, independent of the bytes."""

    bandwidth: Bandwidth
    """Bytes per second that a rank sends while it receives as many. If the link is `shared`, the sum over all ranks of a host.
    """

    overlap: Annotated[float, Field(ge=0, le=1), ValueDescription("a share, from 0 to 1")] = 1.0
    """The share of an exchange that overlaps with computing. A waiting rank works for the remainder: for all of it if ranks
    read each other's memory, and for a part if message threads need the computing cores.
    """


class LinkTable(ExchangeTable):
    """A link between ranks. A kind of exchange with different figures has its own table."""

    shared: bool = False
    """Whether the ranks of a host share the bandwidth, such as that of one network card."""

    send: ExchangeTable | None = None
    """Messages between stages."""

    sum: ExchangeTable | None = None
    """All-reduces."""

    gather: ExchangeTable | None = None
    """All-gathers."""

    reduce: ExchangeTable | None = None
    """Reduce-scatters."""

    swap: ExchangeTable | None = None
    """All-to-alls."""


class LinksTable(Table):
    """The links between ranks, by type."""

    same_host: LinkTable | None = None
    """Between ranks of one host."""

    other_host: LinkTable | None = None
    """Between ranks of different hosts."""

    ranks_per_host: Annotated[int, Field(ge=1, le=1024)] = 8
    """Ranks on one host. Rank r is on host r // ranks_per_host."""


class HostTable(Table):
    """Copies between device and host, and an optimizer on the host."""

    to_host: Bandwidth
    """Bytes per second from the device."""

    to_device: Bandwidth
    """Bytes per second to the device."""

    latency_s: Latency = 0.0
    """Seconds of a copy, independent of its bytes."""

    memory_bandwidth: Bandwidth | None = None
    """Bytes per second that an operator on the host's cores reads and writes in total."""


class EngineTable(Table):
    """The host's seconds of a step outside its layers if the host runs ahead, on one rank with clipping and AdamW."""

    step_s: Latency
    """Seconds of a step, independent of its size."""

    parameter_s: Latency
    """Seconds per trained parameter of a rank and step."""

    micro_s: Latency
    """Seconds of a microbatch."""

    gradient_s: Latency
    """Seconds per trained parameter and microbatch."""

    def seconds(self, num_trained: int, num_micros: int) -> float:
        """Returns the seconds of a step with `num_trained` trained parameters and `num_micros` microbatches."""
        micro_batch_s = self.micro_s + self.gradient_s * num_trained
        return self.step_s + self.parameter_s * num_trained + micro_batch_s * num_micros


class LayerTable(Table):
    """Seconds seconds of one distinct layer under one activation policy and microbatch size."""

    key: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$"), ValueDescription("16 hexadecimal digits")]
    """Digest of the layer's class, parameters and inputs."""

    name: str
    """The first layer of the model with this key."""

    forward: Seconds
    """Seconds of its forward."""

    backward: Seconds
    """Seconds of its whole backward, with recomputation."""

    input_gradient: Seconds
    """Seconds of the first half of a split backward, with recomputation."""

    weight_gradient: Seconds
    """Seconds of the second half."""

    host_forward: Seconds = 0.0
    """Seconds of the host to launch the forward, or 0 if the host does not run ahead. Excludes the accumulation of gradients.
    """

    host_backward: Seconds = 0.0
    host_input_gradient: Seconds = 0.0
    host_weight_gradient: Seconds = 0.0

    output_bytes: Annotated[int, Field(ge=0, le=10**13), ValueDescription("bytes, from 0 to 1e13")]
    """Bytes of its output."""

    activations: str | None = None
    """The activation policy of the measurement. A layer that policies do not affect is listed once."""

    micro_size: Annotated[int, Field(ge=1)] | None = None
    """Samples of the microbatch."""


class MachineFile(Table):
    """A machine, as `train-cli calibrate` writes it."""

    format: Literal[1]
    """The format of this file."""

    device: DeviceTable
    """The device."""

    links: LinksTable = Field(default_factory=LinksTable)
    """The links between ranks."""

    host: HostTable | None = None
    """The copies of offload."""

    engine: EngineTable | None = None
    """The host's seconds outside layers."""

    layers: Array[LayerTable] = ()
    """The timed layers. Other layers are counted from their operators, in proportion to variants listed here."""


def load_machine(path: str | Path) -> MachineFile:
    """Returns the machine that the file at `path` describes. Imports no torch.

    Raises PlanError with the line of the fault: "machine-unreadable" or "syntax" for a file that cannot be read as TOML, and
    the code of the fault for a key ("missing-key", "unknown-key", "out-of-range", "wrong-type", "wrong-value").
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
    """Returns the machine that plain data describes. Raises the errors of `load_machine` for a wrong key."""
    return _validate_machine(read_tables(tables))


def machine_text(machine: MachineFile) -> str:
    """Returns the text of the machine file. Reading it returns an equal machine."""
    return tomli_w.dumps(to_plain_data(machine))


def _validate_machine(document: Document) -> MachineFile:
    try:
        return MachineFile.model_validate(document.tables)
    except ValidationError as error:
        problems = validation_diagnostics(error, MachineFile, document.tables, (), document, "the machine file")
        raise PlanError.from_diagnostics(sort_by_place(problems)) from None
