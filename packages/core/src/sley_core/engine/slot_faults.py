"""The errors for gradients that cannot be taken or read, and the checks that raise them."""

from __future__ import annotations

from torch import Tensor

from sley_core.engine.book import Entry
from sley_core.engine.stand_in import sharded_read
from sley_core.errors import RunError


def dense(gradient: Tensor, entry: Entry) -> Tensor:
    """Returns `gradient` of `entry` unchanged. Raises RunError `sparse-gradient` if it is a sparse tensor."""
    if gradient.is_sparse:
        raise RunError(
            "sparse-gradient",
            f"the gradient of the parameter {entry.name!r} is sparse, which no reducer and no norm takes",
            hint="make its module with `sparse=False`",
        )
    return gradient


def frozen(entry: Entry) -> RunError:
    """Returns the error `gradient-frozen`: `entry` has no slot."""
    return RunError(
        "gradient-frozen",
        f"the parameter {entry.name!r} is frozen, so it has no gradient in this step",
        hint="ask `entry in store` first: parameters may be frozen and trained again between steps",
    )


def by_autograd(entry: Entry) -> RunError:
    """Returns the error `canonical-autograd`: `entry` belongs to a linear or an embedding, but autograd made its gradient."""
    return RunError(
        "canonical-autograd",
        f"the parameter {entry.name!r} of a linear or an embedding is used in another way too, or has a hook, is used under "
        "autocast or differentiated twice: the order in which its gradients are added is then the layout's",
        hint='use [parallel] reduction = "fast"',
    )


def assigned(entry: Entry) -> RunError:
    """Returns the error `gradient-assigned`: a backward assigned the gradient of `entry` in a way that cannot be followed."""
    return RunError(
        "gradient-assigned",
        f"a backward assigns the gradient of the parameter {entry.name!r} itself (`weight.grad = ...`), after it was complete "
        "or where sums are canonical",
        hint="let the backward return the gradient, for a weight that is an argument of its `apply`",
    )


def without_gradients() -> RunError:
    """Returns the error `gradients-freed`: an offload discarded all gradients, and no step has begun since."""
    return RunError(
        "gradients-freed",
        "gradients were freed by an offload, and no step has made new ones",
        hint="read them before `run.memory.offload()`, or leave them where they are: `run.memory.offload(...)` with the "
        "names of other parts",
    )


def shards_fixed(name: str) -> RunError:
    """Returns the error `shards-fixed`: the parameter `name` was frozen or unfrozen, and a sharded optimizer cannot follow."""
    return RunError(
        "shards-fixed",
        f"the parameter {name!r} was frozen or unfrozen, but a sharded optimizer lays out its states when the run is made",
        hint="freeze it in the plan (`freeze = true` in a group of [optimizer]), or take a reducer such as `dp.bucketed`",
    )


def frozen_within(name: str) -> RunError:
    """Returns the error `frozen-within-step`: the parameter `name` was frozen or unfrozen between two calls of one step."""
    return RunError(
        "frozen-within-step",
        f"the parameter {name!r} was frozen or unfrozen between two calls of one step, whose gradients add up",
        hint="freeze and unfreeze parameters after a step outside `run.accumulate()`",
    )


def reached_within(name: str) -> RunError:
    """Returns the error `gradient-reached`: a program's own backward reached `name` between two calls of one step."""
    return RunError(
        "gradient-reached",
        f"a backward between two calls of one step reached the parameter {name!r}, so its gradient is no longer their sum",
        hint="use `torch.autograd.grad`, which adds to no parameter, or do it after a step outside `run.accumulate()`",
    )


def check_not_sharded(entry: Entry) -> None:
    """Raises RunError `sharded-weight-read` if `entry` is sharded: autograd reached a shard, which only its communicator may
    use.
    """
    if entry.shard is not None:
        raise sharded_read(entry, "the forward reads")
