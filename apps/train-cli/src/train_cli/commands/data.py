"""`train-cli data`: `show` prints counts and samples of a plan's data, `prepare` fills caches, and `export` writes tokens."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from sley_core.data.dataset import IGNORE_INDEX, SOURCE, AnyDataset, DataContext, Dataset, Split, TextIds, is_stream
from sley_core.errors import UsageError
from sley_core.files import replace_atomically
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Component
from sley_core.records import DatasetRecord
from train_cli.console import FormatOption, OutputFormat, PlanArgument, SetOption, print_line

data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show the data as a plan's model receives it.")

_MAX_COUNTED_SAMPLES = 10_000
"""The maximum number of samples that are read to count the tokens of a dataset without an attribute `counts`."""


@data.command()
def show(
    plan: PlanArgument,
    split: Annotated[
        str, typer.Option("--split", metavar="train|held_out|NAME", help="The split or the set of [evaluation.sets] to show.")
    ] = "train",
    sample: Annotated[int | None, typer.Option("--sample", metavar="N", min=0, help="Also show sample N.")] = None,
    overrides: SetOption = None,
    output_format: FormatOption = OutputFormat.text,
) -> None:
    """Print counts of the plan's data; with --sample, also one sample as text, document by document."""
    resolved = load_plan(plan, overrides or [])
    sets = resolved.evaluation_sets
    if split not in ("train", "held_out", *sets):
        names = ", ".join(f"`{name}`" for name in ("train", "held_out", *sets))
        raise UsageError("no-split", f"there is no split `{split}`", hint=f"use one of {names}")
    data, data_split = resolved.data, split
    if split not in ("train", "held_out"):
        data, data_split = sets[split].data, "held_out" if sets[split].settings.split == "held_out" else "train"
    any_dataset = _open_dataset(data, DataContext(resolved.run.seed, cast(Split, data_split)))
    if is_stream(any_dataset) or not {"tokens", "labels"} <= any_dataset.info.fields.keys():
        hint = "use a dataset with a length whose samples have `tokens` and `labels`"
        raise UsageError("no-tokens", f"`{data.name}` has no tokens that can be read by index", hint=hint)
    dataset = cast("Dataset", any_dataset)
    counts = _count_tokens(dataset)
    if sample is not None and sample >= len(dataset):
        raise UsageError("no-sample", f"the split has only the samples 0 to {len(dataset) - 1}")
    fields = _read_sample(dataset, sample) if sample is not None else None
    if output_format is OutputFormat.json:
        sample_entry = {} if fields is None else {"sample": fields}
        print(json.dumps({"split": split, "samples": len(dataset), **counts, **sample_entry}))
        return
    print(f"{split}: {len(dataset)} samples")
    for name, count in counts.items():
        if name == "dropped":
            for reason, number in count.items():
                print(f"  {'dropped':<11}{number}: {reason}")
        elif name == "sources":
            for source, source_counts in count.items():
                print(f"  {source}: " + ", ".join(f"{number} {unit}" for unit, number in source_counts.items()))
        else:
            print(f"  {name:<11}{'unknown' if count is None else f'{count:.2%}' if name == 'packing' else count}")
    if fields is not None:
        print(f"\nsample {sample}, with its labels in brackets:")
        for line in format_documents(fields, _load_text_ids(data)):
            print(line)


@data.command()
def prepare(plan: PlanArgument, overrides: SetOption = None) -> None:
    """Open the plan's data once, so that later runs on this host find cached results, such as tokens."""
    resolved = load_plan(plan, overrides or [])
    splits: tuple[Split, ...] = ("train", "held_out") if resolved.evaluation is not None else ("train",)
    for split in splits:
        dataset = _open_dataset(resolved.data, DataContext(resolved.run.seed, split))
        if is_stream(dataset):
            raise UsageError("no-tokens", f"`{resolved.data.name}` is a stream, so there is nothing to prepare")
        print_line(f"{split}: {len(cast('Dataset', dataset))} samples")
        for note in getattr(dataset, "data_notes", ()):
            print_line(note)


@data.command()
def export(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder for train.bin and val.bin.")],
    overrides: SetOption = None,
) -> None:
    """Write the plan's tokens as nanoGPT does: raw little-endian uint16, or uint32 if the vocabulary exceeds 65,536 tokens."""
    resolved = load_plan(plan, overrides or [])
    config = resolved.data.config
    has_held_out = getattr(config, "held_out", 0) or getattr(config, "held_out_files", ())
    for split, name in (("train", "train.bin"), *([("held_out", "val.bin")] if has_held_out else [])):
        dataset = _open_dataset(resolved.data, DataContext(resolved.run.seed, cast(Split, split)))
        if not hasattr(dataset, "token_parts"):
            raise UsageError("no-tokens", f"`{resolved.data.name}` has no stream of tokens", hint="use `data.text`")
        dtype, stored = ("uint16", "<u2") if (dataset.info.vocab_size or 0) <= 1 << 16 else ("uint32", "<u4")
        count = 0
        out.mkdir(parents=True, exist_ok=True)
        with replace_atomically(out / name) as file:
            for part in dataset.token_parts:
                file.write(part.astype(stored).data)
                count += len(part)
        print_line(f"{out / name}: {count} tokens, {dtype}, vocab_size = {dataset.info.vocab_size}")


def _open_dataset(data: Component, context: DataContext) -> AnyDataset:
    """Returns the dataset of the table `data`. Imports torch only if a factory makes the dataset, or if its module does so."""
    if data.record is not None:
        return cast("AnyDataset", data.build(context))
    from sley_core.data.batches import open_dataset

    return open_dataset(data, context)


def _read_sample(dataset: Dataset, index: int) -> dict[str, list[int]]:
    """Returns the fields of sample `index` as flat lists of integers. Imports torch."""
    return {name: value.reshape(-1).tolist() for name, value in dataset[index].items()}


def _count_tokens(dataset: Dataset) -> dict[str, Any]:
    """Returns the dataset's counts by name. "packing" is the share of positions that are not padding; it is None if the number
    of padding positions is not known, or if there are no positions.
    """
    counts = dict(getattr(dataset, "counts", None) or _count_sample_tokens(dataset))
    is_known = counts["padding"] is not None and counts["positions"]
    counts["packing"] = 1 - counts["padding"] / counts["positions"] if is_known else None
    return counts


def _count_sample_tokens(dataset: Dataset) -> dict[str, Any]:
    """Returns the counts of the first `_MAX_COUNTED_SAMPLES` samples, in total and by source. Unknown counts are None."""
    names: Sequence[str] = getattr(dataset, "sources", ())
    counts = [Counter(samples=0, tokens=0, trained=0) for _ in names or "1"]
    for index in range(min(len(dataset), _MAX_COUNTED_SAMPLES)):
        fields = _read_sample(dataset, index)
        labels, source = fields["labels"], fields[SOURCE][0] if names else 0
        counts[source].update(samples=1, tokens=len(labels), trained=sum(label >= 0 for label in labels))
    num_left = len(dataset) - _MAX_COUNTED_SAMPLES
    dropped = {f"not counted: samples after the first {_MAX_COUNTED_SAMPLES}": num_left} if num_left > 0 else {}
    tokens, trained = (sum(count[key] for count in counts) for key in ("tokens", "trained"))
    totals = {"documents": None, "padding": None, "longest": None, "tokens": tokens, "trained": trained, "positions": tokens}
    by_source = {"sources": dict(zip(names, map(dict, counts), strict=True))} if names else {}
    return {**totals, "dropped": dropped, **by_source}


def _load_text_ids(data: Component) -> TextIds | None:
    """Returns the mapping between text and token ids of the dataset, or None if the dataset has no such mapping."""
    record = data.record
    if not isinstance(record, DatasetRecord) or record.text_ids is None:
        return None
    ids: TextIds = record.load(record.text_ids)(data.config, None)
    return ids


def format_documents(fields: Mapping[str, Sequence[int]], ids: TextIds | None) -> Iterator[str]:
    """Yields the positions of each document of a sample, and then its text, with brackets around tokens that are labels. For
    padding, yields only the positions. fields: the fields of the sample as flat lists, by name. ids: converts token ids to
    text; if None, the text consists of the token ids.
    """
    tokens, labels = fields["tokens"], fields["labels"]
    starts = sorted({*fields.get("cu_seqlens", (0,)), len(tokens)})
    for start, stop in pairwise(starts):
        is_padding = not any(tokens[start:stop]) and all(label == IGNORE_INDEX for label in labels[start:stop]) and start > 0
        yield f"-- positions {start} to {stop - 1}{': padding' if is_padding else ''}"
        if is_padding:
            continue
        values = [*tokens[start:stop], *([labels[stop - 1]] if labels[stop - 1] >= 0 else [])]
        are_labels = [False, *(label >= 0 for label in labels[start : start + len(values) - 1])]
        yield "".join(_mark_labels(values, are_labels, ids))


def _mark_labels(values: Sequence[int], are_labels: Sequence[bool], ids: TextIds | None) -> Iterator[str]:
    """Yields the text of each group of consecutive tokens: labels in brackets, and other tokens without brackets."""
    for is_label, group in groupby(zip(values, are_labels, strict=True), key=itemgetter(1)):
        tokens = [token for token, _ in group]
        text = "".join(ids.decode(tokens)) if ids is not None else " ".join(map(str, tokens)) + " "
        yield f"[{text}]" if is_label else text
