"""One fault per row of the league, as in other programs. A row that does not differ with its fault checks nothing.

`with FAULTS["tied-stages"](): ...` injects the fault into this process for the block. Ranks have it, references do not.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

Fault = Callable[[], AbstractContextManager[Any]]

FAULTS: dict[str, Fault] = {}
"""The faults by the names of their rows."""


def wrong(path: str, *rows: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that replaces `path`, "module:Class.method". It gets the original function and its arguments."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        def context() -> AbstractContextManager[Any]:
            module, _, attributes = path.partition(":")
            owner: Any = import_module(module)
            *classes, name = attributes.split(".")
            for class_name in classes:
                owner = getattr(owner, class_name)
            original = getattr(owner, name)

            def call_replacement(*args: Any, **options: Any) -> Any:
                return replacement(original, *args, **options)

            is_static = classes and isinstance(vars(owner)[name], staticmethod)
            return patch.object(owner, name, staticmethod(call_replacement) if is_static else call_replacement)

        FAULTS.update(dict.fromkeys(rows, context))
        return replacement

    return register


@wrong("sley_core.losses.cross_entropy:CrossEntropy.loss", "accumulation")
def mean_of_micro_batches(original: Any, self: Any, output: Any, batch: Any) -> Any:
    """Weights eight microbatches equally, although their numbers of labels, 55 in total, differ."""
    return original(self, output, batch) / self.weight(batch) * 55 / 8


@wrong("sley_dp.sums:AllReduceSums.start", "uneven-ranks")
def mean_of_ranks(original: Any, self: Any, buffer: Any, group: Any) -> None:
    """Weights both ranks equally, although one has 60 of the 68 labels."""
    buffer.data.mul_(68 / (2 * (60, 8)[group.coord]))
    original(self, buffer, group)


@wrong("sley_dp.sums:AllReduceSums.start", "masked-ranks")
def counts_ranks_without_labels(original: Any, self: Any, buffer: Any, group: Any) -> None:
    """Divides a sum by the number of ranks, although one of them has no label."""
    buffer.data.div_(group.size)
    original(self, buffer, group)


@wrong("sley_trainer.execute:Executor.run", "held-out")
def mean_of_held_out_parts(original: Any, self: Any, steps: Any, state: Any, run: Any) -> Any:
    """Weights both ranks equally, although their numbers of labels, 68 in total, differ."""
    loss = original(self, steps, state, run)
    own = sum(int((micro["labels"] >= 0).sum()) for micro in run.batch)
    return loss * 68 / (2 * own) if run.store is None else loss


@wrong("sley_core.losses.chunked_head:LogitsHead.cross_entropy", "vocabulary-wp")
def counts_ignored_labels(original: Any, self: Any, logits: Any, labels: Any, ignore_index: int, smoothing: float) -> Any:
    """Treats ignored labels as the first class."""
    return original(self, logits, labels.masked_fill(labels == ignore_index, 0), ignore_index, smoothing)


@wrong("sley_models.llama:SelfAttention.forward", "packed-dp")
def sees_other_documents(original: Any, self: Any, x: Any, positions: Any, cu_seqlens: Any) -> Any:
    """Attends without document bounds."""
    return original(self, x, positions, None)


@wrong("sley_isp.attention:_attend", "packed-sp")
def loses_bounds_over_slices(original: Any, attention: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """Attends over full sequences without document bounds."""
    return original(attention, group, *args, **{**kwargs, "cu_seqlens": None})


@wrong("sley_isp.attention:repeat_heads", "shared-heads-sp")
def detaches_copies_of_heads(original: Any, tensor: Any, num_ranks: int) -> Any:
    """Sums only half of the gradients of a head that ranks share."""
    repeated = original(tensor, num_ranks)
    return repeated if repeated is tensor else (repeated + repeated.detach()) / 2


@wrong("sley_pp.shared:SharedModules.finish_step", "tied-stages")
def sums_no_ties(original: Any, self: Any, step: Any) -> None:
    """Leaves each stage with its part of the gradient."""


@wrong("sley_pp.shared:SharedModules.finish_step", "sharded-ties")
def sums_ties_twice(original: Any, self: Any, step: Any) -> None:
    """Sums the gradients twice."""
    original(self, step)
    original(self, step)


@wrong("sley_core.engine.direct:WeightQueue.run", "split-backward-dp", "split-backward-wp")
def drops_last_weight_gradients(original: Any, self: Any, place: tuple[int, int]) -> None:
    """Drops the weight gradients of the last microbatch."""
    if place[1] == 3:
        self._queued[place] = []
    original(self, place)


@wrong("sley_core.engine.reduction:Totals.__init__", "clip-pp", "clip-wp-pp")
def counts_every_copy(original: Any, self: Any, groups: Any, gradients: Any, loss: Any, kind: Any) -> None:
    """Counts a gradient once per rank that has it."""
    copies = [grad._replace(stages=grad.stages[:1], num_shards=groups[grad.reduce_group].size) for grad in gradients]
    original(self, groups, copies, loss, kind)


@wrong("sley_isp.sharded_modules:ShardedModule._reduce", "adapters-wp")
def trains_one_layer(original: Any, self: Any, rows: Any, inputs: Any) -> None:
    """Keeps only the gradients of the first layer."""
    original(self, rows if self.name.startswith("blocks.0.") else torch.zeros_like(rows), inputs)


@wrong("sley_pp.link:Link.send", "adapters-pp")
def stops_gradients(original: Any, self: Any, transfer: Any, description: Any, tensors: Any, key: Any) -> None:
    """Sends zeros instead of gradients."""
    sent = [torch.zeros_like(tensor) for tensor in tensors] if transfer.flow == "backward" else tensors
    original(self, transfer, description, sent, key)


@wrong("sley_core.engine.call:LayerCaller._seed", "dropout-pp")
def draws_other_numbers(original: Any, self: Any, layer: str, micro: Any) -> int:
    """Draws other random numbers in a recomputation."""
    call, seen = (layer, micro.step, micro.global_micro), self.__dict__.setdefault("seen", set())
    is_again = call in seen
    seen.add(call)
    seed: int = original(self, layer, micro)
    return seed ^ is_again


@wrong("sley_memory.movers:HostCopyMover._send", "offload")
def restores_old_values(original: Any, self: Any, placed: Any) -> None:
    """Restores the values of the first offload."""
    is_first, before = not self._num_freed_bytes, [host.clone() for _, host in placed]
    original(self, placed)
    for (_, host), older in zip([] if is_first else placed, before, strict=False):
        host.copy_(older)


@wrong("sley_trainer.restore:RunRestorer._read_state", "resume-wp")
def forgets_optimizer_states(original: Any, self: Any, optimizer_param: Any) -> Any:
    """Resets the moments on all ranks except rank 0."""
    return {} if self.state.parts.world.rank else original(self, optimizer_param)


@wrong("sley_trainer.restore:RunRestorer._read_state", "resume-pp")
def forgets_states_of_ties(original: Any, self: Any, optimizer_param: Any) -> Any:
    """Resets the moments of the tied table on the stage that did not save them."""
    is_lost = self.state.parts.world.rank and optimizer_param.param.tie_axis is not None
    return {} if is_lost else original(self, optimizer_param)


@wrong("sley_core.data.feed:Feed.restore", "resume-again")
def starts_with_the_first_sample(original: Any, self: Any, state: Any) -> None:
    """Starts a resumed run with its first samples."""


@wrong("sley_core.engine.weights:MasterWeights.write_back", "bf16-masters")
def rounds_masters(original: Any, self: Any) -> None:
    """Rounds the master weights to bf16 after every step."""
    with torch.no_grad():
        for master in self.local_params:
            master.parameter.copy_(master.parameter.bfloat16())
    original(self)


@wrong("sley_trainer.restore:RunRestorer._read_local", "resume-masters")
def masters_from_weights(original: Any, self: Any, name: str, region: Any, like: Any = None) -> Any:
    """Recreates master weights from rounded weights."""
    value = original(self, name, region, like)
    return value.bfloat16().float() if name.startswith("weights/") else value
