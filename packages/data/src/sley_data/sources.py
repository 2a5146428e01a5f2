"""What a mixture's tables say of its sources: which have a split, what is wrong with them; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.api.data import SOURCE, DataContext, DataRows, Order, Split, TextIds
from sley_core.errors import KeyPath, PlanError, SleyError, UsageError
from sley_core.records import DatasetRecord, Problem
from sley_data.config import ChatConfig, DocumentsConfig, MixtureConfig, SourceTable, TokensConfig
from sley_data.documents import copied_tokens
from sley_data.files import token_files
from sley_data.interleave import Interleave, whole_shares

if TYPE_CHECKING:
    from sley_core.api.plan import Component

_PROBE = "Two sources of one mixture, 3 x 14 = 42: déjà vu!\n"
"""A text that tokenizers of different models split in different ways."""


def sources_of(config: MixtureConfig, split: Split) -> list[tuple[int, SourceTable]]:
    """Returns the sources that have samples of a split, with their numbers; all of them if no table says so."""
    every = list(enumerate(config.sources))
    return every if split == "train" else [(number, source) for number, source in every if _holds_out(source)] or every


def _holds_out(source: SourceTable) -> bool:
    """Returns whether the source holds samples out; one whose table does not say may."""
    config = source.component.config
    said = [getattr(config, key) for key in ("held_out", "held_out_files") if hasattr(config, key)]
    return any(said) or not said


def component_of(config: MixtureConfig, number: int) -> Component:
    """Returns a source's data set, ready to be opened, which leaves out what the other sources hold out."""
    component = config.sources[number].component
    if not isinstance(component.config, DocumentsConfig):
        return component
    others = (source.component.config for source in config.sources if source.component is not component)
    return replace(component, config=component.config.with_siblings(others))


def path_of(number: int, path: KeyPath) -> KeyPath:
    """Returns where a key of `[data]`, as the record of a source names it, is in the plan."""
    return ("data", "sources", number, *path[1:]) if path[:1] == ("data",) else path


@contextmanager
def located(number: int, name: str) -> Iterator[None]:
    """Gives errors that arise in a source its name and the paths of its own table."""
    try:
        yield
    except SleyError as error:
        every = error.diagnostics
        moved = (replace(one, message=f"source `{name}`: {one.message}", path=path_of(number, one.path)) for one in every)
        raise type(error).many(moved) from error


def source_seed(context: DataContext, source: SourceTable) -> int:
    """Returns the seed of a source, which depends on its name, but not on the other sources."""
    return int.from_bytes(blake2b(f"{context.seed}/{source.name}".encode(), digest_size=7).digest())


class MixtureOrder:
    """Maps the samples of a mixture to those of its sources.

    Number n of the whole run is number c of one source. This is place c % length in epoch c // length of the source, which has
    an order of its own. lengths: the numbers of samples of the sources that have the split. Raises PlanError "data-exhausted"
    if the run needs more samples than a source with `exhausted = "refuse"` has.
    """

    def __init__(self, config: MixtureConfig, context: DataContext, lengths: Sequence[int]) -> None:
        self._config = config
        self._context = context
        self._lengths = lengths
        self._sources = [source for _, source in sources_of(config, context.split)]
        self._starts_over = context.split == "train" and config.exhausted != "repeat"
        self._order = lru_cache(maxsize=2 * len(lengths))(self._source_order)
        if config.by_epochs:
            counts = [(source.epochs or 0) * length for source, length in zip(self._sources, lengths, strict=True)]
            self._interleave = Interleave([max(1, round(count)) for count in counts])
            self._length = self._interleave.total
        else:
            self._interleave = Interleave(whole_shares([source.weight or 0 for source in self._sources]))
            self._length = self._epoch_length()

    def _epoch_length(self) -> int:
        end_of = self._interleave.last_with if self._starts_over else self._interleave.first_with
        ends = [end_of(source, length) for source, length in enumerate(self._lengths)]
        length = min(ends) if self._starts_over else max(ends)
        num_needed = self._context.num_samples
        if self._config.exhausted == "refuse" and self._starts_over and num_needed is not None and num_needed > length:
            name = self._sources[ends.index(length)].name
            message = f"the run needs {num_needed} samples, but the source `{name}` is exhausted after {length}"
            hint = 'use fewer steps, a smaller weight for it, or `exhausted = "repeat"`'
            raise PlanError("data-exhausted", message, path=("data", "exhausted"), hint=hint)
        return length

    def _source_order(self, number: int, epoch: int) -> Order:
        source = self._sources[number]
        is_shuffled = self._config.shuffle and getattr(source.component.config, "shuffle", True)
        return Order(self._lengths[number], seed=source_seed(self._context, source), epoch=epoch, shuffle=is_shuffled)

    def __len__(self) -> int:
        """The number of samples in an epoch of the mixture."""
        return self._length

    def place(self, epoch: int, index: int) -> tuple[int, int, int]:
        """Returns the source of sample `index` of an epoch, the source's epoch, and the sample in the source."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._starts_over:
            number, place = self._interleave[index]
        else:
            number, count = self._interleave[epoch * len(self) + index]
            epoch, place = divmod(count, self._lengths[number])
        return number, epoch, self._order(number, epoch)[place]


class MixtureRows:
    """The samples of the first epoch of a mixture as lists of numbers: `api.data.DataRows`."""

    counts = None

    def __init__(self, config: MixtureConfig, context: DataContext, rows: Sequence[DataRows]) -> None:
        self.sources = tuple(source.name for _, source in sources_of(config, context.split))
        self._rows = rows
        self._order = MixtureOrder(config, replace(context, num_samples=None), list(map(len, rows)))
        self._num_starts = max(len(source.row(0).get("cu_seqlens", ())) for source in rows)

    def __len__(self) -> int:
        return len(self._order)

    def row(self, index: int) -> dict[str, Sequence[int]]:
        number, _, sample = self._order.place(0, index)
        row = {**self._rows[number].row(sample), SOURCE: [number]}
        if starts := row.get("cu_seqlens"):
            row["cu_seqlens"] = [*starts, *[starts[-1]] * (self._num_starts - len(starts))]
        return row


def mixture_rows(config: MixtureConfig, context: DataContext) -> MixtureRows | None:
    """Returns the samples of a mixture; None if a source can be read only with torch: `DatasetRecord.rows`."""
    rows = []
    for number, source in sources_of(config, context.split):
        component = component_of(config, number)
        record = component.record
        if not isinstance(record, DatasetRecord) or record.rows is None:
            return None
        with located(number, source.name):
            rows.append(record.load(record.rows)(component.config, replace(context, seed=source_seed(context, source))))
    return None if None in rows else MixtureRows(config, context, rows)


def check_mixture(config: MixtureConfig, *, evaluates: bool, vocab_size: int | None = None) -> Iterator[Problem]:
    """Yields the problems of a mixture, and those of each source's own table: `DatasetRecord.check`."""
    held_out = [number for number, source in enumerate(config.sources) if evaluates and _holds_out(source)]
    problems: list[Problem] = []
    for number, source in enumerate(config.sources):
        record = source.component.record
        if isinstance(record, DatasetRecord) and record.check is not None:
            check = record.load(record.check)
            for one in check(component_of(config, number).config, evaluates=number in held_out, vocab_size=vocab_size):
                problems.append(replace(one, path=path_of(number, one.path)))
    if evaluates and not held_out:
        hint = "give one `held_out`, a share, or `held_out_files`"
        problems.append(Problem(("evaluation",), "no source of the mixture holds anything out", hint, "held-out"))
    if not problems:
        problems += [*_unlike(config), *_copied_tokens(config)]
    yield from dict.fromkeys(problems)


def _unlike(config: MixtureConfig) -> Iterator[Problem]:
    """Yields a problem for each source whose samples cannot be beside those of the first one, as far as tables tell."""
    first: dict[str, tuple[str, Any]] = {}
    for number, source in enumerate(config.sources):
        for key, (what, value) in _kind_of(source).items():
            name, known = first.setdefault(key, (source.name, value))
            if value != known:
                message = (
                    f"samples of a mixture need the same {what}: `{name}` has {_shown(known)}, `{source.name}` {_shown(value)}"
                )
                yield Problem(("data", "sources", number), message, _HINTS.get(key), "mixture-sources")
                break


_HINTS = {
    "documents": "write the same `documents` in all; `data.chat` packs",
    "vocab_size": "name one tokenizer in all; `data.tokens` needs the `vocab_size` of the tokenizer that wrote its files",
    "ids": "name one tokenizer in all",
}


def _kind_of(source: SourceTable) -> dict[str, tuple[str, Any]]:
    """Returns by name, with it in words, what must be the same in all sources."""
    config, record = source.component.config, source.component.record
    kind: dict[str, tuple[str, Any]] = {}
    if isinstance(config, ChatConfig):
        kind["documents"] = "`documents`", "pack"
    for key in ("sequence", "documents", "vocab_size"):
        if (value := getattr(config, key, None)) is not None:
            kind[key] = f"`{key}`", value
    if isinstance(record, DatasetRecord) and record.text_ids is not None:
        ids: TextIds = record.load(record.text_ids)(config, None)
        kind["vocab_size"] = "`vocab_size`", ids.size
        kind["ids"] = "token ids of a text", tuple(ids.encode(_PROBE)[ids.num_before :])
    return kind


def _shown(value: Any) -> str:
    return "others" if isinstance(value, tuple) else repr(value)


def _copied_tokens(config: MixtureConfig) -> Iterator[Problem]:
    """Yields a problem for each held-out token file of one source that is in the files of another."""
    for (number, own), (_, other) in permutations(enumerate(config.sources), 2):
        held_out, trained = own.component.config, other.component.config
        if isinstance(held_out, TokensConfig) and isinstance(trained, TokensConfig) and held_out.held_out_files:
            for one in copied_tokens(token_files(trained, "train")[0], token_files(held_out, "held_out")[0]):
                yield replace(one, path=path_of(number, one.path))


def text_ids(config: MixtureConfig, tokenizer: Path | None) -> TextIds:
    """Returns the token ids of the sources' text, which are the same in all: `DatasetRecord.text_ids`."""
    for source in config.sources:
        record = source.component.record
        if isinstance(record, DatasetRecord) and record.text_ids is not None:
            ids: TextIds = record.load(record.text_ids)(source.component.config, tokenizer)
            return ids
    raise UsageError("no-vocabulary", "no source of the mixture has a tokenizer", hint="give it: `--tokenizer PATH`")


def describe_overlap(own: MixtureConfig, evaluated: MixtureConfig) -> str:
    """Says how many held-out documents of each source of `evaluated` a source of `own` was trained on; "" if none."""
    words = []
    for number, source in sources_of(evaluated, "held_out"):
        record = source.component.record
        if not isinstance(record, DatasetRecord) or record.describe_overlap is None:
            continue
        for at, other in enumerate(own.sources):
            if other.component.name == source.component.name:
                said = record.load(record.describe_overlap)(
                    component_of(own, at).config, component_of(evaluated, number).config
                )
                words += [f"`{source.name}` in `{other.name}`: {said}"] if said else []
    return "; ".join(words)
