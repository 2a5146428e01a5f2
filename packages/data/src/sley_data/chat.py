"""Packs whole conversations into rows of equal length, with their labels and boundaries; torch-free."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sley_core.api.data import IGNORE_INDEX, DataContext
from sley_core.errors import PlanError
from sley_data import cache
from sley_data.chat_template import ChatTemplate, Encoded
from sley_data.config import ChatConfig
from sley_data.conversations import Conversation, chat_files, empty_split_error, read_conversations
from sley_data.files import split_files
from sley_data.streams import Integers, Stream, map_tokens


@dataclass
class ChatStats:
    """Counts the conversations of a split.

    documents: the number of conversations. samples: the number of packed token sequences. A conversation has several if the
    template rewrites earlier turns. tokens, trained: the number of tokens of these samples, and of tokens with a label.
    longest: the number of tokens of the longest conversation. dropped: the number of dropped samples by reason. first_dropped:
    the name of the first dropped sample by reason. copied: the number of conversations that are also held out. remarks:
    sentences about the template.
    """

    documents: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    copied: int = 0
    remarks: list[str] = field(default_factory=list)

    def add(self, stats: ChatStats) -> None:
        """Adds the counts of more conversations."""
        for name in ("documents", "samples", "tokens", "trained", "copied"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.longest = max(self.longest, stats.longest)
        self.dropped.update(stats.dropped)
        self.first_dropped = {**stats.first_dropped, **self.first_dropped}

    def drop(self, reason: str, name: str) -> None:
        """Counts a dropped sample."""
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, name)

    def notes(self) -> list[str]:
        """Returns sentences for the user."""
        notes = list(self.remarks)
        if self.copied:
            notes.append(f"{self.copied} conversations in `files` are also in `held_out_files`: training excludes them")
        for reason, count in self.dropped.items():
            name = self.first_dropped[reason]
            notes.append(f"{count} samples are {'cut' if reason == CUT else 'dropped'}, `{name}` first: {reason}")
        return notes


_LABEL_BIT = 1 << 31
"""The bit of a stored token that is set if the token is a label."""

TOO_LONG = "longer than `sequence`"
CUT = "longer than `sequence`, and cut there"
NOT_TRAINED = "no token has a label"


class ChatRows:
    """The rows of a split: whole conversations, packed by best fit into `sequence` positions per row.

    A conversation of n tokens has n - 1 positions, since its last token is only a label. stream: the tokens of all
    conversations, with `_LABEL_BIT` for labels. rows: the numbers of the samples in each row.

    The constructor renders and tokenizes all conversations, or maps cached tokens. It raises PlanError "data-short" if there is
    no conversation, "data-too-long" for a conversation that the plan refuses, and "chat-mask" if no token or every token has a
    label. template: the table's template if it is already loaded.
    """

    def __init__(self, config: ChatConfig, context: DataContext, template: ChatTemplate | None = None) -> None:
        self.sequence = config.sequence
        self.template = template or ChatTemplate(config.tokenizer, config.template)
        self.stats = ChatStats()
        self._config, self._split = config, context.split
        self._first: Conversation | None = None
        pairs = self._cached_parts() or self._tokenize()
        lengths = [length for _, part in pairs for length in part]
        self.stream = Stream([ids for ids, _ in pairs], np.cumsum([0, *lengths]))
        self.rows = pack_best_fit([length - 1 for length in lengths], config.sequence)
        self.max_documents = max(map(len, self.rows)) + 1  # the last is the padding

    def _cached_parts(self) -> list[tuple[Integers, Sequence[int]]] | None:
        """Returns the mapped tokens and the sample lengths of each part in the cache, or None if tokens are not cached."""
        config = self._config
        files, held_out = split_files(config, self._split, chat_files)
        limits = (config.train_on, config.sequence, config.too_long)
        options = (*limits, config.field, config.held_out, config.largest_share, self._split)
        digest = self.template.digest
        folder = cache.cache_folder(
            config.cache if digest else "none", files, held_out, ("chat", 5, digest, *options), cache.MIN_CACHED_BYTES
        )
        if folder is None:
            return None

        def summarize(parts: Sequence[cache.Part]) -> dict[str, Any]:
            for part in parts:
                for stats in part.read_stats():
                    self.stats.add(_load_stats(stats))
            self._check()
            return {"stats": vars(self.stats)}

        encode = partial(encode_conversations, self.template, config)
        try:
            num_bytes = sum(file.num_bytes for file in files)
            complete = cache.prepare_parts(
                folder, self._read(), lambda conversation: conversation.size_and_key[0], encode, num_bytes, summarize
            )
            parts = [_map_part(part) for part in cache.list_parts(folder, complete["parts"])]
        except OSError as error:
            cache.report(f"the tokens are not kept in {folder}: {error}")
            return None
        self.stats = _load_stats(complete["stats"])
        return parts

    def _tokenize(self) -> list[tuple[Integers, Sequence[int]]]:
        """Returns the tokens and sample lengths of all conversations as one part."""
        ids, lengths, stats = encode_conversations(self.template, self._config, self._read())
        self.stats.add(_load_stats(stats))
        self._check()
        return [(np.array(ids), lengths)]

    def _read(self) -> Iterator[Conversation]:
        """Yields the conversations of the split, and counts the excluded copies of held-out ones."""
        self.stats, self._first = ChatStats(remarks=self.template.remarks()), None
        for conversation, is_selected in read_conversations(self._config, self._split):
            if is_selected:
                self._first = self._first or conversation
                yield conversation
            elif self._split == "train" and not self._config.largest_share:
                self.stats.copied += 1

    def _check(self) -> None:
        """Raises PlanError if there is no conversation, or if no token or every token has a label."""
        if self._first is None:
            raise empty_split_error(self._config, self._split)
        is_all_trained = self.stats.trained == self.stats.tokens - self.stats.samples
        if not self.stats.samples or (self._config.train_on != "all" and is_all_trained):
            raise self._mask_error(self._first)

    def _mask_error(self, conversation: Conversation) -> PlanError:
        """Returns the PlanError "chat-mask", which shows the first conversation."""
        problem = "every token has a label" if self.stats.samples else "no token of a conversation has a label"
        reasons = "; ".join(f"{count}: {reason}" for reason, count in self.stats.dropped.items())
        try:
            text = self.template.render(conversation.messages, conversation.tools)
        except ValueError as error:
            text = str(error)
        message = (
            f"{problem}{f' ({reasons})' if reasons else ''}; the first conversation, `{conversation.name}`, is {text[:500]!r}"
        )
        hint = 'use the roles "user" and "assistant", or set `train_on = "all"` to train on every token'
        return PlanError("chat-mask", message, path=("data", "train_on"), hint=hint)

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> dict[str, Integers]:
        """Returns row `index`: tokens, labels and positions, int64 [sequence], and `cu_seqlens`, int32 [max_documents + 1].

        Token 0 with ignored labels pads the row. The padding is a separate document, so that no other token attends to it.
        """
        tokens, labels = np.zeros(self.sequence, np.int64), np.full(self.sequence, IGNORE_INDEX)
        positions, starts, start = np.arange(self.sequence), [], 0
        for number in self.rows[index]:
            ids = self.stream.read(*self.stream.offsets[number : number + 2].tolist())
            stop = start + len(ids) - 1
            tokens[start:stop] = ids[:-1] % _LABEL_BIT
            labels[start:stop] = np.where(ids[1:] < _LABEL_BIT, IGNORE_INDEX, ids[1:] % _LABEL_BIT)
            positions[start:stop] -= start
            starts.append(start)
            start = stop
        positions[start:] -= start
        cu_seqlens = np.full(self.max_documents + 1, self.sequence, np.int32)
        cu_seqlens[: len(starts) + 1] = [*starts, start]
        return {"tokens": tokens, "labels": labels, "positions": positions, "cu_seqlens": cu_seqlens}

    def row(self, index: int) -> dict[str, list[int]]:
        """Returns row `index` as lists."""
        return {name: values.tolist() for name, values in self.sample(index).items()}

    @property
    def digest(self) -> str:
        """A digest of all tokens, labels and sample lengths."""
        return self.stream.digest

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about the template and dropped conversations."""
        return self.stats.notes()

    @property
    def counts(self) -> dict[str, Any]:
        """The counts, as in `DataRows`."""
        stats = self.stats
        return {
            "documents": stats.documents,
            "tokens": stats.tokens,
            "trained": stats.trained,
            "positions": len(self.rows) * self.sequence,
            "padding": len(self.rows) * self.sequence - (stats.tokens - stats.samples),
            "longest": stats.longest,
            "dropped": dict(stats.dropped),
        }


def encode_conversations(
    template: ChatTemplate, config: ChatConfig, conversations: Iterable[Conversation]
) -> tuple[array[int], array[int], dict[str, Any]]:
    """Returns the tokens of conversations, the length of each sample, and the attributes of the `ChatStats`."""
    ids, lengths, stats = array("I"), array("q"), ChatStats()
    for conversation, samples, reason in template.encode(conversations, config):
        stats.documents += 1
        if reason:
            stats.drop(reason, conversation.name)
        for sample in samples:
            _append_sample(config, conversation, sample, ids, lengths, stats)
    return ids, lengths, vars(stats)


def _append_sample(
    config: ChatConfig, conversation: Conversation, sample: Encoded, ids: array[int], lengths: array[int], stats: ChatStats
) -> None:
    """Appends a sample of a conversation to `ids` and `lengths`, or counts it as dropped."""
    stats.longest = max(stats.longest, len(sample.ids))
    limit = config.sequence + 1
    if len(sample.ids) > limit:
        if config.too_long == "refuse":
            message = f"`{conversation.name}` has {len(sample.ids)} tokens, more than `sequence` has positions"
            hint = 'raise `sequence`, or set `too_long` to "drop" or "cut"'
            raise PlanError("data-too-long", message, path=("data", "too_long"), hint=hint)
        stats.drop(TOO_LONG if config.too_long == "drop" else CUT, conversation.name)
        if config.too_long == "drop":
            return
    tokens = list(sample.ids)
    for start, stop in sample.trained:
        tokens[start:stop] = [token + _LABEL_BIT for token in tokens[start:stop]]
    num_trained = sum(token >= _LABEL_BIT for token in tokens[1:limit])  # the first token is not a label
    if not num_trained:
        stats.drop(NOT_TRAINED, conversation.name)
        return
    ids.extend(tokens[:limit])
    lengths.append(len(tokens[:limit]))
    stats.samples += 1
    stats.tokens += min(len(sample.ids), limit)
    stats.trained += num_trained


def _load_stats(values: dict[str, Any]) -> ChatStats:
    """Returns the `ChatStats` with these attributes, which may come from JSON."""
    return ChatStats(**{**values, "dropped": Counter(values["dropped"])})


def _map_part(part: cache.Part) -> tuple[Integers, Sequence[int]]:
    if not part.tokens.stat().st_size:
        return np.empty(0, np.uint32), array("q")
    return map_tokens(part.tokens, "uint32"), array("q", part.lengths.read_bytes())


def pack_best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Packs items into bins of `size`, longest first, and returns the item numbers of each bin, sorted.

    lengths: the length of each item, from 1 to `size`. Best-fit decreasing needs at most 11/9 of the optimal number of bins,
    plus a constant (Johnson et al., 1974).
    """
    bins: list[list[int]] = []
    bins_by_space: list[list[int]] = [[] for _ in range(size + 1)]  # the bins with each free space
    space_bits = 0  # bit s is set if a bin has the free space s
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        fitting_bits = space_bits >> length
        space = length + (fitting_bits & -fitting_bits).bit_length() - 1 if fitting_bits else size
        if fitting_bits:
            index = bins_by_space[space].pop()
            if not bins_by_space[space]:
                space_bits ^= 1 << space
        else:
            index = len(bins)
            bins.append([])
        bins[index].append(number)
        bins_by_space[space - length].append(index)
        if space > length:  # the bin is not full
            space_bits |= 1 << space - length
    return sorted(map(sorted, bins))
