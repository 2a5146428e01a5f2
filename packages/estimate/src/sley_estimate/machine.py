"""The machine file: its tables, and reading and writing it. Units: seconds, bytes, FLOPs; a bandwidth is bytes per second.

Every figure has limits that no machine exceeds, so that a slip of the pen (milliseconds for seconds, a sign) is refused.
`train-cli calibrate` writes the file. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, model_validator

from sley_core.errors import PlanError
from sley_core.plan.document import Document, sort_by_place, to_plain_data
from sley_core.plan.faults import validation_diagnostics
from sley_core.plan.read import read_file, read_tables
from sley_core.table import Array, Table, Words
from sley_core.words import describe_value

MACHINE_FORMAT = 1
Bandwidth = Annotated[float, Field(ge=1e3, le=1e15), Words("bytes per second, from 1e3 to 1e15")]
Latency = Annotated[float, Field(ge=0, le=10), Words("seconds, from 0 to 10")]
Rate = Annotated[float, Field(ge=1e6, le=1e17), Words("floating-point operations per second, from 1e6 to 1e17")]
Measured = Annotated[float, Field(ge=0, le=1e5), Words("seconds, from 0 to 100,000")]


class MatmulTable(Table):
    """Products of one dtype: n FLOPs take (n + half_flops) / flops_per_s seconds."""

    flops_per_s: Rate
    """The rate of the largest products; not the peak of a datasheet."""

    half_flops: Annotated[float, Field(ge=0, le=1e15), Words("FLOPs, from 0 to 1e15")] = 0.0
    """FLOPs of a product that reaches half of that rate: small products do not fill a device."""


class MatmulsTable(Table):
    """Products by the dtype of their inputs, `[device.matmul.bf16]`."""

    fp64: MatmulTable | None = None
    fp32: MatmulTable | None = None  # where tensor cores multiply them as tf32, at that rate
    bf16: MatmulTable | None = None
    fp16: MatmulTable | None = None


class DeviceTable(Table):
    """One device, as a rank has it."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """Printed with estimates."""

    kind: Literal["cpu", "cuda"]
    """On `"cuda"` the host starts kernels ahead of the device, and a step takes the longer of both; on `"cpu"` both add up."""

    memory: Annotated[int, Field(ge=10**6, le=10**14), Words("bytes, from 1e6 to 1e14")] | None = None
    """Bytes of memory."""

    memory_bandwidth: Bandwidth
    """Bytes per second that an operator reads and writes together."""

    launch_s: Annotated[float, Field(ge=0, le=0.1), Words("seconds, from 0 to 0.1")]
    """Seconds of the host for one operator."""

    step_s: Annotated[float, Field(ge=0, le=60), Words("seconds, from 0 to 60")] = 0.0
    """Seconds of a step beside its operators and exchanges."""

    matmul: MatmulsTable
    """How fast it multiplies, by dtype."""


class WayTable(Table):
    """One kind of exchange over a link."""

    latency_s: Latency
    """Seconds from one rank to another whatever the bytes."""

    bandwidth: Bandwidth
    """Bytes per second that a rank sends while it receives as many; of all ranks of a host together where it is `shared`."""

    overlap: Annotated[float, Field(ge=0, le=1), Words("a share, from 0 to 1")] = 1.0
    """The share of an exchange that runs beside computing. A rank that waits works for the rest: for all of it where ranks read
    each other's memory, for some where threads that carry messages need the cores that compute."""


class LinkTable(WayTable):
    """A link between ranks; a kind of exchange with other figures has a table of its own."""

    shared: bool = False
    """Whether the ranks of a host share the bandwidth, as of one network card."""

    send: WayTable | None = None
    """Messages between stages."""

    sum: WayTable | None = None
    """All-reduces."""

    gather: WayTable | None = None
    """All-gathers."""

    reduce: WayTable | None = None
    """Reduce-scatters."""

    swap: WayTable | None = None
    """All-to-alls."""


class LinksTable(Table):
    """Links by kind."""

    same_host: LinkTable | None = None
    """Between ranks of one host."""

    other_host: LinkTable | None = None
    """Between ranks of different hosts."""

    ranks_per_host: Annotated[int, Field(ge=1, le=1024)] = 8
    """Ranks that run on one host: rank r is on host r // ranks_per_host."""


class HostTable(Table):
    """Copies between device and host, and an optimizer that steps on the host."""

    to_host: Bandwidth
    """Bytes per second from the device."""

    to_device: Bandwidth
    """Bytes per second to the device."""

    latency_s: Latency = 0.0
    """Seconds of a copy whatever its bytes."""

    memory_bandwidth: Bandwidth | None = None
    """Bytes per second that an operator on the host's cores reads and writes together."""


class EngineTable(Table):
    """The host's seconds of a step beside its layers, on one rank, clipped, with AdamW, where the host runs ahead."""

    step_s: Latency
    """Seconds of a step, whatever its size."""

    parameter_s: Latency
    """Seconds for each trained parameter of a rank, once a step."""

    micro_s: Latency
    """Seconds of a micro-batch."""

    gradient_s: Latency
    """Seconds for each trained parameter and micro-batch."""

    def seconds(self, num_trained: int, num_micros: int) -> float:
        """Returns the seconds of a step with so many trained parameters and micro-batches."""
        of_micro_s = self.micro_s + self.gradient_s * num_trained
        return self.step_s + self.parameter_s * num_trained + of_micro_s * num_micros


class LayerTable(Table):
    """Measured seconds of one distinct layer under one activation policy and micro-batch size."""

    key: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$"), Words("16 hexadecimal digits")]
    """Digest of the layer's class, parameters and inputs."""

    name: str
    """The first layer of the model that has it."""

    forward: Measured
    """Seconds of its forward."""

    backward: Measured
    """Seconds of its whole backward, recomputation included."""

    input_gradient: Measured
    """Seconds of the first half of a split backward, recomputation included."""

    weight_gradient: Measured
    """Seconds of the second half."""

    host_forward: Measured = 0.0
    """Seconds of the host to start each, where it runs ahead of the device, without the accumulation of gradients; else 0."""

    host_backward: Measured = 0.0
    host_input_gradient: Measured = 0.0
    host_weight_gradient: Measured = 0.0

    output_bytes: Annotated[int, Field(ge=0, le=10**13), Words("bytes, from 0 to 1e13")]
    """Bytes of its output."""

    activations: str | None = None
    """The activation policy under which it was timed; a layer that policies leave alone is listed once."""

    micro_size: Annotated[int, Field(ge=1)] | None = None
    """Samples of the micro-batch."""

    sp: Annotated[int, Field(ge=1)] = 1
    """Over how many ranks a sequence was cut."""


class MachineFile(Table):
    """A machine, as `train-cli calibrate` writes it."""

    format: Literal[1]
    """The format of this file."""

    device: DeviceTable
    """The device."""

    links: LinksTable = Field(default_factory=LinksTable)
    """The links between ranks."""

    host: HostTable | None = None
    """Copies that offload makes."""

    engine: EngineTable | None = None
    """The host's seconds beside layers."""

    layers: Array[LayerTable] = ()
    """Layers that were timed; others are counted from their operators, in proportion to variants listed here."""

    @model_validator(mode="after")
    def _check_kind(self) -> MachineFile:
        if self.device.kind == "cpu" and (self.engine or any(layer.host_forward for layer in self.layers)):
            raise ValueError("a CPU runs ahead of no device, so it has no `[engine]`, and its layers no `host_forward`")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> MachineFile:
        keys = [layer.key for layer in self.layers]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"the layer {twice[0]} is listed twice")
        return self


MAKE = "`train-cli calibrate --out machine.toml` writes one"


def load_machine(path: str | Path) -> MachineFile:
    """Returns the machine that the file at `path` describes. Imports no torch.

    Raises PlanError, with the line of the fault: "machine-missing" and the like for a file that cannot be read as TOML,
    "machine-format" for another format, and what is wrong with each key ("missing-key", "unknown-key", "out-of-range",
    "wrong-type", "wrong-value").
    """
    try:
        document = read_file(path)
    except PlanError as error:
        problems = []
        for each in error.diagnostics:
            code, message = each.code.replace("plan-", "machine-", 1), each.message.replace("not a plan", "not a machine file")
            hint = MAKE if code == "machine-missing" else each.hint
            problems.append(replace(each, code=code, message=message, hint=hint))
        raise PlanError.many(problems) from None
    return _checked(document)


def machine_from_dict(tables: Mapping[str, Any]) -> MachineFile:
    """Returns the machine that plain data describes. Raises PlanError as `load_machine`, for a wrong format or key."""
    return _checked(read_tables(tables))


def machine_text(machine: MachineFile) -> str:
    """Returns the file's text; reading it gives an equal machine."""
    return tomli_w.dumps(to_plain_data(machine))


def _checked(document: Document) -> MachineFile:
    tables = document.tables
    version = tables.get("format")
    if version != MACHINE_FORMAT or isinstance(version, bool):
        message = "this is no machine file: it has no `format`"
        if "format" in tables:
            message = f"`format` is {describe_value(version)}, but this version reads machine files of format {MACHINE_FORMAT}"
        raise PlanError.many([document.diagnostic("machine-format", message, ("format",), MAKE)])
    try:
        return MachineFile.model_validate(tables)
    except ValidationError as error:
        problems = validation_diagnostics(error, MachineFile, tables, (), document, "the machine file")
        raise PlanError.many(sort_by_place(problems)) from None
