"""Checks the tables of a mixture's sources. Does not import torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from sley_core.api.data import Split, TextIds
from sley_core.api.plan import Component
from sley_core.errors import KeyPath, SleyError, UsageError
from sley_core.records import DatasetRecord, Problem
from sley_data.documents import find_copied_tokens
from sley_data.files import find_token_files
from sley_data.plugin import ChatConfig, DocumentsConfig, MixtureConfig, SourceTable, TokensConfig

_PROBE_TEXT = "Two sources of one mixture, 3 x 14 = 42: déjà vu!\n"
"""A text that the tokenizers of different models split differently. Sources with equal ids for it share a tokenizer."""


def list_sources(config: MixtureConfig, split: Split) -> list[tuple[int, SourceTable]]:
    """Returns the index and the table of each source that may have samples in `split`, or of all sources if none may."""
    sources = list(enumerate(config.sources))
    return sources if split == "train" else [pair for pair in sources if _may_hold_out(pair[1])] or sources


def _may_hold_out(source: SourceTable) -> bool:
    """Returns whether the source may hold out samples; True if its table has no keys for held-out data."""
    config = source.component.config
    values = [getattr(config, key) for key in ("held_out", "held_out_files") if hasattr(config, key)]
    return any(values) or not values


def build_source_component(config: MixtureConfig, number: int) -> Component:
    """Returns the dataset component of source `number`; its training split also excludes other sources' held-out documents."""
    component = config.sources[number].component
    if not isinstance(component.config, DocumentsConfig):
        return component
    siblings = (source.component.config for source in config.sources if source.component is not component)
    return replace(component, config=component.config.with_siblings(siblings))


def to_source_path(number: int, path: KeyPath) -> KeyPath:
    """Returns the path of a key of `[data]` in the table of source `number`. Returns the path of any other key unchanged."""
    return ("data", "sources", number, *path[1:]) if path[:1] == ("data",) else path


@contextmanager
def locate_errors(number: int, name: str) -> Iterator[None]:
    """Adds the name of a source to the message of a SleyError in the block, and moves its key paths to the source's table."""
    try:
        yield
    except SleyError as error:
        raise type(error).from_diagnostics(
            replace(diagnostic, message=f"source `{name}`: {diagnostic.message}", path=to_source_path(number, diagnostic.path))
            for diagnostic in error.diagnostics
        ) from error


def check_mixture(config: MixtureConfig, *, evaluates: bool, vocab_size: int | None = None) -> Iterator[Problem]:
    """Yields the problems of a mixture and of its sources' tables (`DatasetRecord.check`). vocab_size: the model's, or None."""
    held_out = [number for number, source in enumerate(config.sources) if evaluates and _may_hold_out(source)]
    problems: list[Problem] = []
    for number, source in enumerate(config.sources):
        record = source.component.record
        if isinstance(record, DatasetRecord) and record.check is not None:
            check = record.load(record.check)
            source_config = build_source_component(config, number).config
            for problem in check(source_config, evaluates=number in held_out, vocab_size=vocab_size):
                problems.append(replace(problem, path=to_source_path(number, problem.path)))
    if evaluates and not held_out:
        hint = "set `held_out` or `held_out_files` in a source"
        problems.append(Problem(("evaluation",), "no source of the mixture has held-out data", hint, "held-out"))
    if not problems:
        problems += [*_find_differences(config), *_find_copied_tokens(config)]
    yield from dict.fromkeys(problems)


def _find_differences(config: MixtureConfig) -> Iterator[Problem]:
    """Yields a problem for each source whose shared properties differ from those of an earlier source."""
    references: dict[str, tuple[str, Any]] = {}
    for number, source in enumerate(config.sources):
        for key, (label, value) in _read_shared_properties(source).items():
            name, expected = references.setdefault(key, (source.name, value))
            if value != expected:
                values = f"`{name}` has {expected!r} and `{source.name}` has {value!r}"
                if isinstance(value, tuple):
                    values = f"those of `{name}` and `{source.name}` differ"
                message = f"all sources of a mixture must have the same {label}, but {values}"
                yield Problem(("data", "sources", number), message, _HINTS.get(key), "mixture-sources")
                break


_HINTS = {  # the hint for a property that differs between sources, by its key
    "documents": 'set the same `documents` in all sources; `data.chat` always uses "pack"',
    "vocab_size": "use one tokenizer in all sources; set the `vocab_size` of `data.tokens` to the size of its vocabulary",
    "ids": "use one tokenizer in all sources",
}


def _read_shared_properties(source: SourceTable) -> dict[str, tuple[str, Any]]:
    """Returns the label and the value of each property of a source that must be the same in all sources, by its key."""
    config, record = source.component.config, source.component.record
    properties: dict[str, tuple[str, Any]] = {}
    if isinstance(config, ChatConfig):
        properties["documents"] = "`documents`", "pack"
    for key in ("sequence", "documents", "vocab_size"):
        if (value := getattr(config, key, None)) is not None:
            properties[key] = f"`{key}`", value
    if isinstance(record, DatasetRecord) and record.text_ids is not None:
        ids: TextIds = record.load(record.text_ids)(config, None)
        properties["vocab_size"] = "`vocab_size`", ids.size
        properties["ids"] = "token ids of a text", tuple(ids.encode(_PROBE_TEXT)[ids.num_before :])
    return properties


def _find_copied_tokens(config: MixtureConfig) -> Iterator[Problem]:
    """Yields a problem for each held-out token file of a source whose tokens are also in a training file of another source."""
    for (number, source), (_, sibling) in permutations(enumerate(config.sources), 2):
        held_out, trained = source.component.config, sibling.component.config
        if isinstance(held_out, TokensConfig) and isinstance(trained, TokensConfig) and held_out.held_out_files:
            for problem in find_copied_tokens(find_token_files(trained, "train")[0], find_token_files(held_out, "held_out")[0]):
                yield replace(problem, path=to_source_path(number, problem.path))


def load_text_ids(config: MixtureConfig, tokenizer: Path | None) -> TextIds:
    """Returns the sources' `TextIds`, or those of `tokenizer` if set. Raises UsageError "no-vocabulary" if none exist."""
    for source in config.sources:
        record = source.component.record
        if isinstance(record, DatasetRecord) and record.text_ids is not None:
            ids: TextIds = record.load(record.text_ids)(source.component.config, tokenizer)
            return ids
    raise UsageError("no-vocabulary", "no source of the mixture has a tokenizer", hint="pass `--tokenizer PATH`")


def describe_overlap(training: MixtureConfig, evaluation: MixtureConfig) -> str:
    """Returns sentences about sources of `training` that train on held-out documents of `evaluation`; "" if there are none."""
    sentences = []
    for number, source in list_sources(evaluation, "held_out"):
        record = source.component.record
        if not isinstance(record, DatasetRecord) or record.describe_overlap is None:
            continue
        describe, config = record.load(record.describe_overlap), build_source_component(evaluation, number).config
        for training_number, training_source in enumerate(training.sources):
            if training_source.component.name != source.component.name:
                continue
            if sentence := describe(build_source_component(training, training_number).config, config):
                sentences.append(f"`{source.name}` in `{training_source.name}`: {sentence}")
    return "; ".join(sentences)
