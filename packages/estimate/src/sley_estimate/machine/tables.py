"""The tables of a machine file. Units: seconds, bytes, FLOPs; a bandwidth is bytes per second.

Every figure has limits beyond which no machine lies, so that a slip of the pen (milliseconds for seconds, a sign) is refused
and does not become a wrong estimate.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sley_core.table import Array, Table, Words

MACHINE_FORMAT = 1
"""The format of machine files that this core reads."""

Bandwidth = Annotated[float, Field(ge=1e3, le=1e15), Words("bytes per second, from 1e3 to 1e15")]
Latency = Annotated[float, Field(ge=0, le=10), Words("seconds, from 0 to 10")]
Rate = Annotated[float, Field(ge=1e6, le=1e17), Words("floating-point operations per second, from 1e6 to 1e17")]
Measured = Annotated[float, Field(ge=0, le=1e5), Words("seconds, from 0 to 100,000")]


class MatmulTable(Table):
    """How fast products of one dtype are: n FLOPs take (n + half_flops) / flops_per_s seconds."""

    flops_per_s: Rate
    """What the largest products reach; not the peak of a datasheet."""

    half_flops: Annotated[float, Field(ge=0, le=1e15), Words("FLOPs, from 0 to 1e15")] = 0.0
    """FLOPs of a product that reaches half of that: small products do not fill a device."""


class MatmulsTable(Table):
    """Products by the dtype of their inputs, `[device.matmul.bf16]`."""

    fp64: MatmulTable | None = None
    """Of fp64."""

    fp32: MatmulTable | None = None
    """Of fp32; where tensor cores multiply them as tf32, at that rate."""

    bf16: MatmulTable | None = None
    """Of bf16."""

    fp16: MatmulTable | None = None
    """Of fp16."""


class DeviceTable(Table):
    """One device, as a rank has it."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """What it is called; printed with estimates."""

    kind: Literal["cpu", "cuda"]
    """On `"cuda"` the host starts kernels ahead of the device, and the slower of both counts of a step; on `"cpu"` both add
    up."""

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
    """What one kind of exchange reaches over a link."""

    latency_s: Latency
    """Seconds from one rank to another that do not depend on the bytes."""

    bandwidth: Bandwidth
    """Bytes per second that a rank sends while it receives as many; of all ranks of a host together where it is `shared`."""

    overlap: Annotated[float, Field(ge=0, le=1), Words("a share, from 0 to 1")] = 1.0
    """The share of an exchange that runs beside computing. The rest is work of the rank that waits for it: all of it where
    ranks of a host read each other's memory, and some where threads that carry messages need the cores that compute."""


class LinkTable(WayTable):
    """What ranks exchange over, of one kind; a kind of exchange that goes at another rate has a table of its own."""

    shared: bool = False
    """Whether the ranks of a host share the bandwidth, as they do one network card."""

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
    """Copies between the memory of the device and that of its host, and an optimizer that steps there."""

    to_host: Bandwidth
    """Bytes per second from the device."""

    to_device: Bandwidth
    """Bytes per second to the device."""

    latency_s: Latency = 0.0
    """Seconds of a copy that do not depend on its bytes."""

    memory_bandwidth: Bandwidth | None = None
    """Bytes per second that an operator on the host's cores reads and writes together."""


class EngineTable(Table):
    """What the host of a rank alone takes for a step beside its layers, clipped, with AdamW, where the device works through a
    queue. Said since 0.2.
    """

    step_s: Latency
    """Seconds of a step, whatever its size."""

    parameter_s: Latency
    """Seconds for each trained parameter of a rank, once a step."""

    micro_s: Latency
    """Seconds of a micro-batch."""

    gradient_s: Latency
    """Seconds for each trained parameter and micro-batch."""

    def seconds(self, num_trained: int, num_micros: int) -> float:
        """Returns the seconds for a step of a rank with so many trained parameters and micro-batches."""
        of_micro_s = self.micro_s + self.gradient_s * num_trained
        return self.step_s + self.parameter_s * num_trained + of_micro_s * num_micros


class LayerTable(Table):
    """Measured seconds of one distinct layer, under one activation policy, on a micro-batch of one size."""

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
    """Seconds of the host to start the forward, where the device works through a queue; 0 if it does not. Said since 0.2:
    before, the four above were the longer of both."""

    host_backward: Measured = 0.0
    """Seconds of the host to start the whole backward, but for what autograd does with a gradient."""

    host_input_gradient: Measured = 0.0
    """Seconds of the host to start the first half."""

    host_weight_gradient: Measured = 0.0
    """Seconds of the host to start the second half."""

    output_bytes: Annotated[int, Field(ge=0, le=10**13), Words("bytes, from 0 to 1e13")]
    """Bytes of what it hands on."""

    activations: str | None = None
    """The activation policy under which it was timed; one that a policy leaves alone stands there once. Said since 0.2."""

    micro_size: Annotated[int, Field(ge=1)] | None = None
    """Samples of the micro-batch. Said since 0.2."""

    sp: Annotated[int, Field(ge=1)] = 1
    """Over how many ranks a sequence was cut. Said since 0.2."""


class MachineFile(Table):
    """A machine, as `train-cli calibrate` writes it."""

    format: Literal[1]
    """The format of this file."""

    device: DeviceTable
    """What computes."""

    links: LinksTable = Field(default_factory=LinksTable)
    """What ranks exchange over."""

    host: HostTable | None = None
    """Copies that offload makes."""

    engine: EngineTable | None = None
    """What the host takes for a step beside its layers."""

    layers: Array[LayerTable] = ()
    """Layers that were timed; others are computed from their operators, in proportion to what is here of the same layer."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> MachineFile:
        """Returns itself; raises ValueError if a CPU has what only a host has that runs ahead of its device."""
        if self.device.kind == "cpu" and (self.engine or any(layer.host_forward for layer in self.layers)):
            raise ValueError("a CPU runs ahead of no device, so it has no `[engine]`, and its layers no `host_forward`")
        return self

    @model_validator(mode="after")
    def _once(self) -> MachineFile:
        """Returns itself; raises ValueError if two layers have one key."""
        keys = [layer.key for layer in self.layers]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"the layer {twice[0]} stands there twice")
        return self
