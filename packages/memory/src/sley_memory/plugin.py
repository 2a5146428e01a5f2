"""The plan tables and records of the plugin `memory`. Imports no torch."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt

from sley_core.api.plan import Array, Plan, Table, suggestion
from sley_core.errors import Diagnostic, PlanError
from sley_core.hookspecs import hookimpl
from sley_core.records import ActivationPolicyRecord, OffloadManagerRecord, Problem, Record

LayerSelection = PositiveInt | Annotated[Array[str], Field(min_length=1)]
"""The number of blocks, counted from the first, or names and patterns of layers."""

Part = Literal["weights", "buffers", "masters", "optimizer_states", "gradients", "handlers", "pools"]
"""A copy of `sley_core.api.memory.Part`. This module must not import `sley_core.api.memory`, which imports torch."""


class OffloadConfig(Table):
    """Moves memory to the host and back, in copies that overlap with the device's other work."""

    MOVES: ClassVar[tuple[Part, ...]] = ()
    """The parts that a table without the `parts` key moves."""

    bucket_mb: Annotated[float, Field(gt=0)] = 64.0
    """The size in MB (10^6 bytes) of a bucket: the memory that is moved, or the weights that are updated, at a time."""

    host_budget_mb: Annotated[float, Field(ge=0)] | None = None
    """The limit of page-locked host memory in MB (10^6 bytes). Host memory beyond it is pageable, and the run warns once. There
    is no limit by default, nor in `memory.host_optimizer`.
    """

    @property
    def bucket_bytes(self) -> int:
        """The size of a bucket in bytes."""
        return int(self.bucket_mb * 10**6)

    @property
    def moves(self) -> tuple[Part, ...]:
        """The parts of a run's memory that this table moves."""
        return tuple(getattr(self, "parts", self.MOVES))

    @property
    def steps_in_buckets(self) -> bool:
        """Whether optimizer states are on the device only while their weights are updated."""
        return getattr(self, "when", "idle") == "between_steps"


class WeightsConfig(OffloadConfig):
    """Moves parameters and module buffers, including frozen ones."""

    MOVES = ("weights", "buffers")


class MastersConfig(OffloadConfig):
    """Moves the fp32 master weights of weights in narrower dtypes."""

    MOVES = ("masters",)


class StatesConfig(OffloadConfig):
    """Moves the optimizer's states, such as AdamW's moments."""

    MOVES = ("optimizer_states",)

    when: Literal["idle", "between_steps"] = "idle"
    """When states are on the host. `"idle"`: from a call of `run.memory.offload()` until they are onloaded. `"between_steps"`:
    at all times except while their weights are updated.
    """


class GradientsConfig(OffloadConfig):
    """Frees the memory of gradients on offload, and allocates it again, filled with zeros, on onload."""

    MOVES = ("gradients",)


class EverythingConfig(OffloadConfig):
    """Between two steps, moves all memory of the run to the host, or only the parts in `parts`."""

    parts: Annotated[Array[Part], Field(min_length=1)] = get_args(Part)
    """The parts to move. Gradients are freed, pools are trimmed, and all other parts are copied."""


class HostOptimizerConfig(OffloadConfig):
    """Keeps master weights and optimizer states on the host, and updates them there."""

    MOVES = ("masters", "optimizer_states")

    @property
    def steps_in_buckets(self) -> bool:
        return True


class HostConfig(Table):
    """Offloads saved activations of chosen layers to the host, and prefetches them for the backward."""

    layers: LayerSelection | None = None
    """The number of blocks, from the first, or names and patterns (`"blocks.1*"`). By default all blocks: all layers except the
    first and the last.
    """

    min_bytes: NonNegativeInt = 65536
    """The size in bytes below which storages stay on the device, since copying them costs more than it saves."""

    budget_bytes: NonNegativeInt | None = None
    """The limit of offloaded bytes. Storages beyond it stay on the device and are counted. No limit by default."""


class SelectiveConfig(Table):
    """Recomputes layers in their backward like `core.recompute`, but keeps the outputs of their attention."""

    layers: LayerSelection | None = None
    """The layers: the number of blocks, counted from the first, or names and patterns. All blocks by default."""


def match_layers(layers: int | Sequence[str] | None, layer_names: Sequence[str]) -> frozenset[str]:
    """Returns the names in `layer_names` that `layers` matches. layers: None for all blocks (all layers but the first and the
    last), the number of blocks, counted from the first, or names and patterns. layer_names: the names of the whole model's
    layers, in order. Raises PlanError `unknown-layer` if a pattern matches no layer.
    """
    if layers is None or isinstance(layers, int):
        return frozenset(layer_names[1:-1][:layers])
    names: set[str] = set()
    for index, pattern in enumerate(layers):
        matching = [name for name in layer_names if fnmatchcase(name, pattern)]
        if not matching:
            first = ", ".join(f"`{name}`" for name in layer_names[:4])
            hint = suggestion(pattern, layer_names, f"the model's layers are {first}, ...")
            path = ("activations", "layers", index)
            raise PlanError.from_diagnostics([Diagnostic("unknown-layer", f"no layer matches `{pattern}`", path, hint=hint)])
        names.update(matching)
    return frozenset(names)


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if the plan uses `memory.selective` with compiled layers and `sp` above 1."""
    if isinstance(plan.activations.config, SelectiveConfig) and plan.model.config.compile and plan.parallel.sp > 1:
        message = "`memory.selective` needs layers without graph breaks, but the exchanges of `sp` are not compiled"
        hint = "use `core.recompute`, or remove `compile`"
        yield Problem(("activations", "use"), message, hint, "selective-compiled")


@hookimpl
def sley_records() -> list[Record]:
    """Returns the records of the two activation policies and of the offload managers."""

    def record(name: str, config: type[OffloadConfig], **options: Any) -> OffloadManagerRecord:
        return OffloadManagerRecord(
            name=name,
            config=config,
            build="sley_memory.offload:HostOffloadManager",
            parts=attrgetter("moves"),
            scope=lambda config: "per_matrix" if config.steps_in_buckets else "global",
            **options,
        )

    return [
        ActivationPolicyRecord(name="host", config=HostConfig, build="sley_memory.host:HostActivations"),
        ActivationPolicyRecord(name="selective", config=SelectiveConfig, build="sley_memory.selective:SelectiveRecompute"),
        record("weights", WeightsConfig),
        record("masters", MastersConfig),
        record("optimizer_states", StatesConfig),
        record("gradients", GradientsConfig),
        record("host_optimizer", HostOptimizerConfig, steps_on_host=True),
        record("everything", EverythingConfig),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    """Returns the hints for `train-cli search`: which variants to try, and which managers copy memory in each step."""
    moves_every_step = attrgetter("steps_in_buckets")
    by_call = ("weights", "masters", "optimizer_states", "gradients", "everything")
    return {
        **{f"memory.{name}": {"moves_every_step": moves_every_step} for name in by_call},
        "memory.host": {"variants": [{}], "offloads_activations": True},
        "memory.selective": {"variants": [{}]},
    }
