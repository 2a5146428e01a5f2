"""Formats the message of a run before its first step: its size, and files that its folder will not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from train_cli.progress import memory

if TYPE_CHECKING:
    from sley_core.metrics.summary import RunFacts
    from sley_core.plan.plan import Plan

MIB = 1 << 20
JSONL = "core.jsonl"


def opening(facts: RunFacts, plan: Plan, held: Mapping[str, int]) -> str:
    """Returns the lines that are shown before the first step.

        2 ranks, 1,056,896 parameters, 160 steps of 16 samples = 0.59 epochs (655,360 tokens)
        rank 0 holds 4.0 MiB weights, 4.0 MiB gradients, and after the first step the optimizer's states
        memory below is the peak of rank 0's whole process, libraries included

    held: `Run.memory.bytes` of this rank, in bytes; without the optimizer's states, which are allocated in its first step.
    """
    lines = [", ".join((ranks(facts.world), _parameters(facts), _samples(facts, plan))), _held(held), _shown(facts)]
    if all(writer.name != JSONL for writer in plan.metrics):
        names = " and ".join(f"`{writer.name}`" for writer in plan.metrics) or "none"
        lines.append(f"no metrics.jsonl: [[metrics]] lists {names}, and not `{JSONL}`")
    return "\n".join(lines)


def repeats(num_samples: int | None, plan: Plan) -> str:
    """Returns a note if an evaluation of `plan` sees samples more than once; "" if not.

    num_samples: of the held-out data; None if it is not known, as for a stream.
    """
    assert plan.evaluation is not None, "the plan has no [evaluation]"
    seen, size = plan.evaluation.steps * plan.batch.global_size, plan.batch.global_size
    if not num_samples or seen <= num_samples:
        return ""
    held_out = f"only {num_samples:,} {'sample is' if num_samples == 1 else 'samples are'} held out"
    times = f"{held_out}, but an evaluation takes {seen:,}: each is used about {seen / num_samples:.2g} times"
    fits = num_samples // size
    return f"{times}; " + (f"`[evaluation] steps = {fits}` avoids this" if fits else f"a batch takes {size:,}")


def ranks(count: int) -> str:
    """Returns a number of ranks in words: `1 rank`, `2 ranks`."""
    return f"{count} rank{'' if count == 1 else 's'}"


def parameters(count: int, trained: int) -> str:
    """Returns numbers of parameters in words: `1,000 parameters`, `8 of 1,000 parameters trained`."""
    return f"{count:,} parameters" if count == trained else f"{trained:,} of {count:,} parameters trained"


def _parameters(facts: RunFacts) -> str:
    return parameters(facts.parameters, facts.trained)


def _samples(facts: RunFacts, plan: Plan) -> str:
    """Returns steps, samples, epochs and tokens as text."""
    steps = plan.run.steps
    text = f"{steps} step{'' if steps == 1 else 's'} of {facts.samples_per_step} samples"
    epochs = facts.epochs(steps)
    text += "" if epochs is None else f" = {epochs:.2g} epochs"
    if facts.tokens_per_sample is None:
        return text
    return f"{text} ({steps * facts.samples_per_step * facts.tokens_per_sample:,} tokens)"


def _held(held: Mapping[str, int]) -> str:
    parts = [f"{memory_of(held[name])} {name}" for name in ("weights", "masters", "gradients") if held[name]]
    return f"rank 0 holds {', '.join(parts)}, and after the first step the optimizer's states"


def _shown(facts: RunFacts) -> str:
    """Returns what the memory in the lines of steps counts."""
    counted = (
        "whole process, libraries included" if facts.device == "cpu" else "tensors on its GPU, activations included"
    )
    return f"memory below is the peak of rank 0's {counted}"


def memory_of(count: int) -> str:
    """Formats bytes: `12 KiB`, `1.5 MiB`, `31.2 GiB`."""
    if count < MIB:
        return f"{count / 1024:.0f} KiB"
    return memory(count / MIB) if count >= 10 * MIB else f"{count / MIB:.1f} MiB"
