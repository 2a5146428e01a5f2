"""The parameter registry: lists every parameter once, with its name, its shape, its modules and its reduce group.

Norms, clipping, counts, checkpoints, offloads and reports iterate over the registry and never over `module.parameters()`. So a
tied weight counts once, names do not depend on the layout, and tensors have no extra attributes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from sley_core.engine.shards import REDUCE_GROUP, Shard, Shards
from sley_core.errors import PlanError, RunError, shorten_names
from sley_core.generators import iterate_leaves
from sley_core.model.layers import Layer, parameter_locations
from sley_core.plan.plan import Component
from sley_core.records import OptimizerRecord, ParameterRole

Stages: TypeAlias = Sequence[tuple[int, Sequence[Layer]]]
"""The parts of the model in model order, each with the number of the stage that holds it. A stage may hold several parts."""

NORM_CLASSES = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
"""The classes of torch's normalization layers, whose parameters have no weight decay."""


@dataclass(frozen=True)
class Holder:
    """A place where a parameter is registered: the attribute `attribute` of `module`, which is in the model chunk `chunk`."""

    module: nn.Module
    attribute: str
    chunk: int


@dataclass(eq=False)
class Param:
    """Describes one parameter of the model, which several modules may share (a tie) and several ranks may hold in shards.

    name: the name in the model's first layer that holds it, e.g. `blocks.0.attention.q.weight`, even if that layer belongs to
    another stage. shape: the shape of the full parameter, in every layout. holders: its places on this rank. aliases: its other
    names on this rank (ties). decays: whether weight decay applies: to matrices, but not to norms, biases and other vectors.
    reduce_group: the axis over which its accumulated gradient must still be summed. shard: this rank's shard; None if the
    parameter is not sharded. stages: the stages that hold it; several for a tie across stages. index: its index in the
    registry. layers: this rank's layers that hold it, in model order. num_sums: the number of partial sums of its gradient
    until it is reduced: one for each of `layers` if the order of sums is fixed, else 1. has_products: whether code other than
    autograd adds to its gradient, for example by `GradientStore.add_product`.
    """

    name: str
    shape: tuple[int, ...]
    holders: list[Holder]
    aliases: list[str] = field(default_factory=list)
    decays: bool = True
    reduce_group: str = "stage"
    shard: Shard | None = None
    stages: tuple[int, ...] = (0,)
    index: int = 0
    layers: tuple[str, ...] = ()
    num_sums: int = 1
    has_products: bool = False

    @property
    def parameter(self) -> nn.Parameter:
        """Returns the current `nn.Parameter`, or this rank's shard. Looks it up at each access, since the object is replaced
        when it gets memory or moves. Raises RunError "weight-replaced" if the module's attribute is no longer a parameter.
        """
        holder = self.holders[0]
        parameter = holder.module._parameters.get(holder.attribute)
        if type(parameter) is nn.Parameter:  # the fast path: a step reads this often, and `Module.__getattr__` is slow
            return parameter
        parameter = getattr(holder.module, holder.attribute, None)
        shard: nn.Parameter | None = getattr(parameter, "shard", None)  # stand-ins and, during a call, full tensors have it
        if shard is not None:
            return shard
        if not isinstance(parameter, nn.Parameter):
            label = "is gone" if parameter is None else f"became a {type(parameter).__name__} instead of a parameter"
            path = f"{type(holder.module).__name__}.{holder.attribute}"
            message = f"the parameter {self.name!r} {label}: {path} was changed after the run was assembled"
            hint = "replace weights (weight_norm, parametrizations, pruning) in the factory, so that the optimizer updates them"
            raise RunError("weight-replaced", message, hint=hint)
        return parameter

    @property
    def family(self) -> tuple[str, tuple[int, ...], int]:
        """Returns the key that the parameters of one buffer must share: reduce group, stages of a tie, and number of sums."""
        return self.reduce_group, self.stages if len(self.stages) > 1 else (), self.num_sums

    @property
    def tie_axis(self) -> str | None:
        """Returns the axis along which stages sum the parameter's gradients, or None if only one stage holds the parameter."""
        return tie_axis(self.stages) if len(self.stages) > 1 else None

    @property
    def row_shard(self) -> Shard:
        """Returns this rank's shard. Asserts that the parameter is sharded along dim 0."""
        assert self.shard is not None, f"{self.name} is not sharded"
        assert self.shard.dim == 0, f"{self.name} is sharded along dim {self.shard.dim}"
        return self.shard

    @property
    def chunks(self) -> frozenset[int]:
        """Returns this rank's model chunks that hold the parameter; several for a tie within the stage."""
        return frozenset(holder.chunk for holder in self.holders)

    @property
    def numel(self) -> int:
        """Returns the number of elements on this rank, including a shard's padding."""
        return self.parameter.numel()

    @property
    def trainable(self) -> bool:
        """Returns whether the parameter requires a gradient now."""
        return self.parameter.requires_grad

    def __repr__(self) -> str:
        return f"Param({self.name}, {list(self.shape)}, {self.reduce_group})"


class ParameterRegistry:
    """Lists the parameters of this rank's layers in model order, each once. chunks: this rank's layers per model chunk. stages:
    all layers of the model; layers of other ranks are on meta. None means that this rank has all layers. shards: this rank's
    shards of sharded parameters, by the id of the parameter.
    """

    def __init__(self, chunks: Sequence[Sequence[Layer]], stages: Stages | None = None, shards: Shards | None = None) -> None:
        self.params: list[Param] = []
        self.base_checksums: dict[str, int] = {}  # checksums of the frozen parameters of a model with adapters, by name
        params_by_id = _index_parameters(stages or [(0, layers) for layers in chunks])
        local_layers = {layer.name for layers in chunks for layer in layers}
        for chunk, layers in enumerate(chunks):
            for layer in layers:
                for name, module, attribute, parameter in parameter_locations(layer.name, layer.module):
                    param = params_by_id[id(parameter)]
                    if not param.holders:
                        param.index = len(self.params)
                        param.layers = tuple(layer_name for layer_name in param.layers if layer_name in local_layers)
                        if (shard := (shards or {}).get(id(parameter))) is not None:
                            param.shard, param.shape, param.reduce_group = shard, shard.shape, REDUCE_GROUP
                        self.params.append(param)
                    if name != param.name:
                        param.aliases.append(name)
                    param.holders.append(Holder(module, attribute, chunk))
        self._by_name = {name: param for param in self.params for name in (param.name, *param.aliases)}

    def check_complete(self, layers: Iterable[Layer]) -> None:
        """Raises RunError "weight-unknown" if `layers` hold a parameter that is not listed: no optimizer would train it."""
        known = {id(param.parameter) for param in self}  # raises "weight-replaced" if one is no longer a parameter
        known |= {id(getattr(holder.module, holder.attribute)) for param in self for holder in param.holders}
        for layer in layers:
            for name, parameter in layer.module.named_parameters(layer.name):
                if id(parameter) not in known:
                    message = f"the parameter {name!r} was added after the run was assembled, so it is not trained"
                    hint = "add or wrap modules, for example with adapters, in the model factory"
                    raise RunError("weight-unknown", message, hint=hint)

    def __iter__(self) -> Iterator[Param]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def __getitem__(self, name: str) -> Param:
        """Returns the parameter with this name or alias. Raises KeyError if there is none."""
        return self._by_name[name]

    @property
    def names(self) -> list[str]:
        """Returns the names of the parameters in model order, without aliases."""
        return [param.name for param in self.params]

    @property
    def trainable(self) -> list[Param]:
        """Returns the parameters that require a gradient now, in model order."""
        return [param for param in self.params if param.trainable]

    @property
    def num_parameters(self) -> int:
        """Returns the number of elements on this rank, without padding. A tied weight counts once."""
        return sum(param.numel - (param.shard.padding if param.shard else 0) for param in self.params)


def is_norm(module: nn.Module) -> bool:
    """Returns whether `module` is one of torch's norms (`NORM_CLASSES`), or its class name ends with "norm" in any case."""
    return isinstance(module, NORM_CLASSES) or type(module).__name__.lower().endswith("norm")


def tie_axis(stages: Sequence[int]) -> str:
    """Returns the name of the axis along which `stages` share a tied parameter, e.g. `tie[0,3]`."""
    return f"tie[{','.join(str(stage) for stage in stages)}]"


def tied_stages(stages: Stages) -> list[tuple[int, ...]]:
    """Returns the sets of several stages that share a parameter, each once, in ascending order."""
    return sorted({param.stages for param in _index_parameters(stages).values() if len(param.stages) > 1})


def _index_parameters(stages: Stages) -> dict[int, Param]:
    """Returns all parameters of the model by id, without holders, each with its first name, its stages and all its layers. The
    result depends only on the full model, so it is equal on every stage, and copies of a tied parameter stay equal.
    """
    params: dict[int, Param] = {}
    for stage, layers in stages:
        for layer in layers:
            for name, module, _, parameter in parameter_locations(layer.name, layer.module):
                decays = parameter.ndim >= 2 and not is_norm(module)
                new_param = Param(name, tuple(parameter.shape), [], decays=decays, stages=())
                param = params.setdefault(id(parameter), new_param)
                param.stages = tuple(sorted({*param.stages, stage}))
                param.layers = tuple(dict.fromkeys((*param.layers, layer.name)))
    return params


def parameter_roles(optimizer: Component, layers: Sequence[Layer]) -> Mapping[str, ParameterRole] | None:
    """Returns the optimizer's role for each parameter of `layers` by name, or None if the optimizer defines no roles."""
    record = optimizer.record
    if not isinstance(record, OptimizerRecord) or record.roles is None:
        return None
    params = ParameterRegistry([[layer] for layer in layers]).params
    roles: Mapping[str, ParameterRole] = record.load(record.roles)(optimizer.config, params)
    return roles


def check_no_parameters(loss: Any) -> None:
    """Raises PlanError "loss-parameters" if a tensor or parameter that requires a gradient is reachable from `loss`."""
    visited, names = set[int](), list[str]()
    members = {**loss._parameters, **loss._modules} if isinstance(loss, nn.Module) else {}
    for key, value in {**members, **getattr(loss, "__dict__", {"": loss})}.items():
        for leaf in iterate_leaves(value, visited):
            if isinstance(leaf, nn.Module):
                names += [f"{key}.{name}" for name, parameter in leaf.named_parameters() if parameter.requires_grad]
            elif isinstance(leaf, Tensor) and leaf.requires_grad:
                names.append(key)
    if names:
        names_text = shorten_names([f"`{name}`" for name in names])
        message = f"the loss has its own parameters, {names_text}, which no step would train"
        hint = "move them into the last layer, whose output the loss receives, or freeze them with `requires_grad_(False)`"
        raise PlanError("loss-parameters", message, path=("loss",), hint=hint)
