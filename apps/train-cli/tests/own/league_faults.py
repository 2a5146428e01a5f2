"""A fault for each row of the league, as others have had it; a row in which it makes no difference measures nothing.

`with fault("tied-stages"): ...` puts it into this process, and takes it out again. Ranks have it, references do not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

Fault = Callable[[], AbstractContextManager[Any]]

FAULTS: dict[str, Fault] = {}
"""By the names of rows."""


def fault(row: str) -> AbstractContextManager[Any]:
    """Returns the context in which this process has the fault of a row."""
    return FAULTS[row]()


def wrong(place: str, *rows: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as what `place`, "module:Class.method", does instead; it gets that first, then its arguments."""

    def register(instead: Callable[..., Any]) -> Callable[..., Any]:
        def context() -> AbstractContextManager[Any]:
            module, _, path = place.partition(":")
            owner: Any = import_module(module)
            *classes, name = path.split(".")
            for one in classes:
                owner = getattr(owner, one)
            original = getattr(owner, name)

            def replaced(*args: Any, **more: Any) -> Any:
                return instead(original, *args, **more)

            is_static = classes and isinstance(vars(owner)[name], staticmethod)
            return patch.object(owner, name, staticmethod(replaced) if is_static else replaced)

        FAULTS.update(dict.fromkeys(rows, context))
        return instead

    return register


@wrong("sley_core.losses.cross_entropy:CrossEntropy.loss", "accumulation")
def mean_of_micro_batches(original: Any, self: Any, output: Any, batch: Any) -> Any:
    """Each of eight microbatches counts alike, whichever of the 55 labels are its own."""
    return original(self, output, batch) / self.weight(batch) * 55 / 8


@wrong("sley_dp.sums:ExactSums.start", "uneven-ranks")
def mean_of_ranks(original: Any, self: Any, buffer: Any, group: Any) -> None:
    """Both ranks count alike: the one with 60 of the 68 labels, and the other."""
    buffer.data.mul_(68 / (2 * (60, 8)[group.coord]))
    original(self, buffer, group)


@wrong("sley_dp.sums:ExactSums.start", "masked-ranks")
def counts_ranks_without_labels(original: Any, self: Any, buffer: Any, group: Any) -> None:
    """A sum is divided by all ranks, though one of them has nothing to add."""
    buffer.data.div_(group.size)
    original(self, buffer, group)


@wrong("sley_core.engine.execute:Executor.run", "held-out")
def mean_of_held_out_parts(original: Any, self: Any, steps: Any, state: Any, run: Any) -> Any:
    """Both ranks count alike, whichever of the 68 labels are their own."""
    loss = original(self, steps, state, run)
    own = sum(int((micro["labels"] >= 0).sum()) for micro in run.batch)
    return loss * 68 / (2 * own) if run.store is None else loss


@wrong("sley_core.losses.chunked_head:LogitsHead.cross_entropy", "vocabulary-wp")
def counts_ignored_labels(original: Any, self: Any, logits: Any, labels: Any, ignore_index: int, smoothing: float) -> Any:
    """An ignored label is taken for the first class."""
    return original(self, logits, labels.masked_fill(labels == ignore_index, 0), ignore_index, smoothing)


@wrong("sley_models.llama:SelfAttention.forward", "packed-dp")
def sees_other_documents(original: Any, self: Any, x: Any, positions: Any, cu_seqlens: Any) -> Any:
    """Attention does not hear of documents."""
    return original(self, x, positions, None)


@wrong("sley_isp.attention:_attend", "packed-sp")
def loses_bounds_over_slices(original: Any, attention: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """The attention over full sequences gets no bounds of documents."""
    return original(attention, group, *args, **{**kwargs, "cu_seqlens": None})


@wrong("sley_isp.attention:repeat_heads", "shared-heads-sp")
def detaches_copies_of_heads(original: Any, tensor: Any, num_ranks: int) -> Any:
    """Sums only half of the gradients of a head that ranks share."""
    repeated = original(tensor, num_ranks)
    return repeated if repeated is tensor else (repeated + repeated.detach()) / 2


@wrong("sley_pp.shared:SharedModules.finish_step", "tied-stages")
def sums_no_ties(original: Any, self: Any, step: Any) -> None:
    """Every stage goes on with a part of the gradient."""


@wrong("sley_pp.shared:SharedModules.finish_step", "sharded-ties")
def sums_ties_twice(original: Any, self: Any, step: Any) -> None:
    """What is a sum already is summed again."""
    original(self, step)
    original(self, step)


@wrong("sley_core.engine.direct:WeightQueue.run", "split-backward-dp", "split-backward-wp")
def drops_last_weight_gradients(original: Any, self: Any, place: tuple[int, int]) -> None:
    """What the last microbatch adds comes too late to be summed."""
    if place[1] == 3:
        self._queued[place] = []
    original(self, place)


@wrong("sley_core.engine.reduction:Totals.__init__", "clip-pp", "clip-wp-pp")
def counts_every_copy(original: Any, self: Any, groups: Any, gradients: Any, loss: Any, kind: Any) -> None:
    """A gradient that several ranks hold counts once for each."""
    every = [one._replace(stages=one.stages[:1], num_shards=groups[one.reduce_group].size) for one in gradients]
    original(self, groups, every, loss, kind)


@wrong("sley_isp.sharded_module:ShardedModule._reduce", "adapters-wp")
def trains_one_layer(original: Any, self: Any, rows: Any, inputs: Any) -> None:
    """Of all layers only the first has gradients."""
    original(self, rows if self.name.startswith("blocks.0.") else torch.zeros_like(rows), inputs)


@wrong("sley_pp.link:Link.send", "adapters-pp")
def stops_gradients(original: Any, self: Any, transfer: Any, description: Any, tensors: Any, key: Any) -> None:
    """A stage that trains nothing sends no gradients."""
    sent = [torch.zeros_like(one) for one in tensors] if transfer.flow == "backward" else tensors
    original(self, transfer, description, sent, key)


@wrong("sley_core.engine.call:LayerCaller._seed", "dropout-pp")
def draws_anew(original: Any, self: Any, layer: str, micro: Any) -> int:
    """A layer that runs again draws other numbers than the first time."""
    call, seen = (layer, micro.step, micro.global_micro), self.__dict__.setdefault("seen", set())
    is_again = call in seen
    seen.add(call)
    seed: int = original(self, layer, micro)
    return seed ^ is_again


@wrong("sley_memory.movers:HostCopy._send", "offload")
def brings_back_older(original: Any, self: Any, placed: Any) -> None:
    """The host keeps what left first."""
    is_first, before = not self._given_back, [host.clone() for _, host, _ in placed]
    original(self, placed)
    for (_, host, _), older in zip([] if is_first else placed, before, strict=False):
        host.copy_(older)


@wrong("sley_core.run_state.tensors:RunRestorer._read_state", "resume-wp")
def forgets_optimizer_states(original: Any, self: Any, stepped: Any) -> Any:
    """Moments begin anew on the second half of the ranks."""
    return {} if self.state.parts.world.rank else original(self, stepped)


@wrong("sley_core.run_state.tensors:RunRestorer._read_state", "resume-pp")
def forgets_states_of_ties(original: Any, self: Any, stepped: Any) -> Any:
    """The tied table's moments begin anew on the stage that did not save them."""
    is_lost = self.state.parts.world.rank and stepped.param.tie_group is not None
    return {} if is_lost else original(self, stepped)


@wrong("sley_core.data.feed:Feed.restore", "resume-again")
def begins_with_the_first_sample(original: Any, self: Any, state: Any) -> None:
    """A run that goes on has its first samples again."""


@wrong("sley_core.engine.weights:Masters.write_back", "bf16-masters")
def rounds_masters(original: Any, self: Any) -> None:
    """What bf16 cannot keep is lost in every step."""
    with torch.no_grad():
        for one in self.stepped:
            one.parameter.copy_(one.parameter.bfloat16())
    original(self)


@wrong("sley_core.run_state.tensors:RunRestorer._read_local", "resume-masters")
def masters_from_weights(original: Any, self: Any, name: str, region: Any, like: Any = None) -> Any:
    """Masters are made of what was rounded."""
    value = original(self, name, region, like)
    return value.bfloat16().float() if name.startswith("weights/") else value
