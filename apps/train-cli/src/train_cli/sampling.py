"""Draws text from a model over tokens, one token at a time, and computes the whole window again for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.errors import RunError, UsageError
from sley_core.records import DatasetRecord

if TYPE_CHECKING:
    from sley_core.data.dataset import TextIds
    from sley_core.plan.plan import Plan
    from sley_core.run import Run


def text_ids(plan: Plan, tokenizer: Path | None) -> TextIds:
    """Returns the ids of the plan's text, or of `tokenizer`, if given, which sley-data reads.

    Raises UsageError "no-vocabulary" if the plan's data do not say how their ids are text, and PluginError if sley-data is
    needed and not installed.
    """
    record = plan.data.record if tokenizer is None else plan.loader.record("datasets", "data.text")
    if not isinstance(record, DatasetRecord) or record.text_ids is None:
        hint = "give the one that made its token ids: `--tokenizer PATH`"
        raise UsageError("no-vocabulary", f"the data of this run, `{plan.data.name}`, has no tokenizer", hint=hint)
    ids: TextIds = record.load(record.text_ids)(plan.data.config, tokenizer)
    return ids


def generate(
    run: Run, ids: Sequence[int], size: int, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> Iterator[int]:
    """Yields ids that follow `ids`, without end; the model is given as many of the last ones as a sample of its data has.

    size: ids are below it. temperature: 0 takes the likeliest. top_k: draws from so many of the likeliest. Raises UsageError
    "sample-fields" and "no-logits" for a model that is not one over tokens, RunError "not-finite".
    """
    reads = _fields(run)
    window = run.dataset.info.sequence
    known = list(ids)
    for layer in run.layers:
        layer.module.eval()
    while True:
        logits = _logits(run, reads, known[-window:] if window else known, size)
        if not bool(logits.isfinite().all()):
            raise RunError("not-finite", "the model gives logits that are not finite", hint="its weights may be damaged")
        known.append(_drawn(logits, temperature, top_k, generator))
        yield known[-1]


def _drawn(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draws the next token id from `logits`: the largest if `temperature` is 0; with `top_k`, from the k largest only."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.where(logits >= logits.topk(top_k).values[-1], -torch.inf)
    # The largest first, so that no temperature overflows.
    weights = ((logits - logits.max()) / temperature).exp()
    return int(torch.multinomial(weights, 1, generator=generator))


def _fields(run: Run) -> dict[str, str]:
    """Returns for each batch field that the model reads what it holds: "tokens", or a name that follows from their number."""
    info = run.dataset.info
    ids = [name for name, field in info.fields.items() if field.ids == "token"]
    roles = dict.fromkeys(ids[:1], "tokens") | {name: name for name in ("positions", "cu_seqlens")}
    for layer in run.layers:
        for name in layer.fields:
            if name not in roles and not ids:
                message = f"layer `{layer.name}` reads `{name}`, but no field of the data is declared as token ids"
                table = f'`{name} = {{dtype = "int64", sequence_dim = 1, ids = "token"}}`'
                hint = f"add them to [data.fields] of `plan.toml` in the run's folder, for example {table}"
                raise UsageError("sample-fields", message, hint=hint)
            if name not in roles:
                message = f"layer `{layer.name}` reads the field `{name}`, which does not follow from a prompt"
                hint = "`run.predict(batch)` in a program of your own takes such a batch: docs/how-to.md"
                raise UsageError("sample-fields", message, hint=hint)
    return {name: roles[name] for layer in run.layers for name in layer.fields}


@torch.no_grad()
def _logits(run: Run, reads: Mapping[str, str], ids: Sequence[int], size: int) -> Tensor:
    """Returns the logits of the next token for the ids below `size`: float64 [v], on the host."""
    values = {"tokens": [list(ids)], "positions": [list(range(len(ids)))], "cu_seqlens": [[0, len(ids)]]}
    declared = run.dataset.info.fields
    device = run.world.device.torch_device
    fields = {
        name: torch.tensor(values[role], dtype=getattr(torch, declared[name].dtype), device=device)
        for name, role in reads.items()
    }
    output: Any = None
    for at, layer in enumerate(run.layers):
        given = {name: fields[name] for name in layer.fields}
        output = layer.module(output, **given) if at else layer.module(**given)
    shape = (1, len(ids))
    if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != shape or output.shape[2] < size:
        what = f"a tensor of {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        message = f"the model returns {what}, not logits [1, {len(ids)}, {size} or more]"
        raise UsageError("no-logits", message, hint="only a model that gives each next token a logit can be sampled")
    return output[0, -1, :size].double().cpu()
