"""A unit: sharded weights that are gathered together into one buffer, and where each of them lies in it.

flat buffer   | query.weight, full  | key.weight, full  | query.bias, full  | ...       aligned, padding rows included
                own rows copied, peers' rows received straight into their places
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sley_core.api.parts import ALIGNMENT_BYTES, offsets, views_of
from sley_core.api.plan import suggestion
from sley_core.errors import PlanError
from sley_isp.config import ANYWHERE

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from sley_core.api.comm import Published, Transport
    from sley_core.api.model import Layer
    from sley_core.api.parts import Param, ParameterRegistry
    from sley_core.api.weights import Shard
    from sley_core.protocols import MemoryPool
    from sley_isp.sites import Site


def sharded_modules(
    layer: Layer, registry: ParameterRegistry, known: Iterable[nn.Module]
) -> Iterator[tuple[str, nn.Module, dict[str, Param]]]:
    """Yields name, module and parameters by attribute of each module of `layer` that directly holds shards and is not
    `known`.
    """
    others = {id(module) for module in known}
    for name, module in layer.module.named_modules(prefix=layer.name):
        if id(module) in others:
            continue
        places = {
            attribute: registry[f"{name}.{attribute}"] for attribute, one in module._parameters.items() if one is not None
        }
        held = {attribute: param for attribute, param in places.items() if param.shard is not None}
        if held:
            yield name, module, held


def shard_of(param: Param) -> Shard:
    """Returns the shard of a parameter that is cut along dim 0; asserts that it is."""
    assert param.shard is not None, f"{param.name} is not sharded"
    assert param.shard.dim == 0, f"{param.name} is cut along dim {param.shard.dim}"
    return param.shard


def padded(param: Param) -> tuple[int, ...]:
    """Returns the shape of the full parameter, padding rows included."""
    shard = shard_of(param)
    return (shard.count * shard.size, *shard.shape[1:])


def unpadded(whole: Tensor, param: Param) -> Tensor:
    """Returns the full tensor of `param`, of shape `padded(param)`, without padding rows: a view, or `whole` if it has none."""
    return whole if len(whole) == param.shape[0] else whole[: param.shape[0]]


@dataclass(eq=False)
class Unit:
    """Names the sharded parameters of layer `layer`, or of one of its modules; a tied parameter is there once.

    has_linear: whether a linear uses them, whose backward may need the weights; the backward of an embedding does not.
    """

    name: str
    layer: str
    params: list[Param] = field(default_factory=list)
    has_linear: bool = False

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The shards as parameters, the same objects for the whole run."""
        return [param.parameter for param in self.params]

    @property
    def shards(self) -> list[Tensor]:
        """The shards as tensors, detached from autograd."""
        return [parameter.detach() for parameter in self.parameters]

    @property
    def stamp(self) -> int:
        """A number that changes with every write to one of the shards."""
        return sum(parameter._version for parameter in self.parameters)

    def __repr__(self) -> str:
        return f"Unit({self.name})"


class Gathered:
    """Holds the full weights of `unit`, in flight until `wait`. The buffer is leased from `pool` until `release`.

    source: gathers them, over `size` ranks. num_bytes: of the buffer. num_received_bytes: the part that comes from peers. The
    shards must not be written until `wait_sent`.
    """

    def __init__(self, unit: Unit, pool: MemoryPool, source: Transport | Published, size: int) -> None:
        parameters = unit.shards
        dtype, device = parameters[0].dtype, parameters[0].device
        starts, numel = layout(unit.params, dtype.itemsize)
        self._versions = {param: (one, one._version) for param, one in zip(unit.params, unit.parameters, strict=True)}
        self.num_received_bytes = sum(parameter.nbytes for parameter in parameters) * (size - 1)
        with ExitStack() as stack:
            flat = stack.enter_context(pool.lease((numel,), dtype, device))
            views = views_of(flat, starts, [padded(param) for param in unit.params])
            self.num_bytes = flat.nbytes
            # Over `wp`, whose ranks gather the same units in one order, each with its parameters in the unit's order.
            self._work = source.all_gather(views, parameters, what=f"the weights of {unit.name}")
            self._stack = stack.pop_all()  # not if the exchange could not start
        self._wholes = {param: unpadded(view, param) for param, view in zip(unit.params, views, strict=True)}

    def is_older(self, params: Iterable[Param]) -> bool:
        """Returns whether the shard of one of `params` was written since the gather started."""
        for param in params:
            parameter, version = self._versions[param]
            if parameter._version != version:
                return True
        return False

    def wait(self) -> None:
        """Blocks until the full weights are in the buffer."""
        self._work.wait()

    def whole(self, param: Param) -> Tensor:
        """Returns the full parameter, without padding; valid from `wait` until `release`."""
        return self._wholes[param]

    def release(self) -> None:
        """Returns the buffer to the pool, once nothing is received into it any more."""
        self._work.release()
        self._stack.close()
        self._wholes = {}

    def wait_sent(self) -> None:
        """Blocks until every peer has this rank's shards; they may be written after that."""
        self._work.wait_sent()


def layout(params: Sequence[Param], itemsize: int) -> tuple[list[int], int]:
    """Returns the element offset of each padded full parameter in a flat buffer, and the size of that buffer in elements."""
    return offsets([padded(param) for param in params], ALIGNMENT_BYTES // itemsize)


MOST_NAMES = 20
"""How many names a message lists."""


class Launches:
    """Registers the launch points of a model. start: called with a layer's unit just before a launch point that is no site
    runs.

    pattern: of module names within a layer. The forward-pre hooks run in recomputations too.
    """

    def __init__(self, pattern: str, start: Callable[[Unit], None]) -> None:
        self.pattern = pattern
        self.start = start
        self.hooks: dict[nn.Module, RemovableHandle] = {}

    def take(self, layer: Layer, unit: Unit, sites: Sequence[Site]) -> None:
        """Marks the launch points of `layer` among its `sites`, and hooks the other ones. unit: the layer's; may be empty."""
        points = set(launch_points(layer, self.pattern) if unit.params else ())
        for site in sites:
            site.launches = not points or site.module in points
        for module in points - {site.module for site in sites} - self.hooks.keys():
            self.hooks[module] = module.register_forward_pre_hook(self._hook(unit))

    def close(self) -> None:
        """Removes all hooks."""
        for handle in self.hooks.values():
            handle.remove()
        self.hooks.clear()

    def _hook(self, unit: Unit) -> Callable[..., None]:
        """Returns a forward-pre hook that starts the prefetches of `unit`."""

        def before(*_: Any) -> None:
            self.start(unit)

        return before


def launch_points(layer: Layer, pattern: str) -> list[nn.Module]:
    """Returns the modules of `layer` whose names within it match; an empty list if any sharded module may start prefetches."""
    if pattern == ANYWHERE:
        return []
    return [module for name, module in _callable(layer).items() if fnmatchcase(name, pattern)]


def check_points(layers: Sequence[Layer], pattern: str) -> None:
    """Raises PlanError "launch-point" if no layer has a launch point."""
    if pattern == ANYWHERE or any(launch_points(layer, pattern) for layer in layers):
        return
    names = list(dict.fromkeys(name for layer in layers for name in _callable(layer)))
    listed = ", ".join(f"`{name}`" for name in names[:MOST_NAMES]) or "none"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    raise PlanError(
        "launch-point",
        f"`{pattern}` matches no module of any layer; within layers there are {listed}{more}",
        path=("weights", "launch"),
        hint=suggestion(pattern, names, "write a name as it is within its layer, or a pattern of some"),
    )


def _callable(layer: Layer) -> dict[str, nn.Module]:
    """Returns the modules of `layer` with a forward, by their names within it; containers such as ModuleList are left out."""
    return {
        name: module for name, module in layer.module.named_modules() if name and type(module).forward is not nn.Module.forward
    }
