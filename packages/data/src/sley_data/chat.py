"""The dataset `data.chat`: whole conversations, packed into rows of equal length, with their labels and boundaries."""

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from sley_core.api.data import IGNORE_INDEX, DataContext, Split
from sley_core.errors import PlanError
from sley_core.records import Problem
from sley_data.chat_template import ChatTemplate
from sley_data.datasets import MAX_CHECK_BYTES, LazyDataset, check_vocabulary, report_errors
from sley_data.documents import Conversation, read_conversations, read_documents
from sley_data.files import DataFile, find_document_files, find_split_files
from sley_data.formats import IntegerArray
from sley_data.plugin import ChatConfig
from sley_data.streams import TokenStream, find_cache_folder, load_tokens


@dataclass
class ChatStats:
    """The counts of conversations (documents), samples, tokens and labels (trained) in a split. A conversation has several
    samples if the template changes earlier turns. longest: the number of tokens of the longest sample, before it is dropped or
    cut. dropped: the number of dropped or cut samples, keyed by reason. first_dropped: the name of the first conversation with
    such a sample, keyed by reason.
    """

    documents: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)

    def add(self, stats: "ChatStats") -> None:
        """Adds `stats`, the counts of later conversations, to these counts."""
        for name in ("documents", "samples", "tokens", "trained"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.longest = max(self.longest, stats.longest)
        self.dropped.update(stats.dropped)
        self.first_dropped = {**stats.first_dropped, **self.first_dropped}

    def drop(self, reason: str, name: str) -> None:
        """Counts a sample that is dropped or cut. name: the name of its conversation."""
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, name)


_LABEL_BIT = 1 << 31  # the bit that is set in a stored token if the token is a label

TOO_LONG_REASON = "longer than `sequence`"  # the reason in `ChatStats.dropped` for a sample that is left out
CUT_REASON = "longer than `sequence`, and cut there"  # the reason for a sample that keeps only its first tokens
NO_LABEL_REASON = "no token has a label"  # the reason for a sample without a label to train on


def encode_conversations(
    template: ChatTemplate, config: ChatConfig, conversations: Iterable[Conversation]
) -> "tuple[array[int], array[int], dict[str, Any]]":
    """Returns the concatenated tokens of all samples, with `_LABEL_BIT` set in labels, the length of each sample, and a dict
    with the fields of `ChatStats`. Raises PlanError "data-too-long" for a sample that is too long, if `too_long` is "refuse".
    """
    ids, lengths, stats, max_length = array("I"), array("q"), ChatStats(), config.sequence + 1
    for conversation, samples, reason in template.encode(conversations, config):
        stats.documents += 1
        if reason:
            stats.drop(reason, conversation.name)
        for sample in samples:
            length = len(sample.ids)
            stats.longest = max(stats.longest, length)
            if length > max_length and config.too_long == "refuse":
                message = f"`{conversation.name}` has {length} tokens, which is more than `sequence` allows"
                hint = 'raise `sequence`, or set `too_long` to "drop" or "cut"'
                raise PlanError("data-too-long", message, path=("data", "too_long"), hint=hint)
            if length > max_length:
                stats.drop(CUT_REASON if config.too_long == "cut" else TOO_LONG_REASON, conversation.name)
                if config.too_long == "drop":
                    continue
            tokens = list(sample.ids)
            for start, stop in sample.label_ranges:
                tokens[start:stop] = [token + _LABEL_BIT for token in tokens[start:stop]]
            del tokens[max_length:]
            num_trained = sum(token >= _LABEL_BIT for token in tokens[1:])  # the first token is not a label
            if not num_trained:
                stats.drop(NO_LABEL_REASON, conversation.name)
                continue
            ids.extend(tokens)
            lengths.append(len(tokens))
            stats.samples += 1
            stats.tokens += len(tokens)
            stats.trained += num_trained
    return ids, lengths, vars(stats)


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items of sizes `lengths`, from 1 to `capacity`, into bins; returns the sorted item numbers of each bin. Best-fit
    decreasing needs at most 11/9 of the optimal number of bins, plus a constant (Johnson et al., 1974).
    """
    bins: list[list[int]] = []
    bins_by_space: dict[int, list[int]] = {}  # the bins with each free space
    spaces: list[int] = []  # the keys of `bins_by_space`, sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        index = bisect_left(spaces, lengths[number])
        if index < len(spaces):
            space = spaces[index]
            chosen_bin = bins_by_space[space].pop()
            if not bins_by_space[space]:
                del bins_by_space[space], spaces[index]
        else:
            space, chosen_bin = capacity, len(bins)
            bins.append([])
        bins[chosen_bin].append(number)
        space -= lengths[number]
        if space and space not in bins_by_space:
            insort(spaces, space)
        if space:
            bins_by_space.setdefault(space, []).append(chosen_bin)
    return sorted(map(sorted, bins))


class ChatDataset(LazyDataset):
    """The dataset of conversations, packed whole by best fit into rows of `sequence` positions, with their boundaries. A
    conversation of n tokens needs n - 1 positions, since its last token is only a label. stats: the `ChatStats`, after loading.
    Loading renders and tokenizes all conversations, or maps the cached tokens. Loading raises PlanError "data-short" or
    "held-out" if the split has no conversation, "data-too-long" for a conversation that `too_long` refuses, and "chat-mask" if
    no token has a label, or if every token has a label although `train_on` is not "all".
    """

    config: ChatConfig

    @property
    def vocab_size(self) -> int:
        return self.template.vocab_size

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template that the table sets, or else the template of its tokenizer."""
        return ChatTemplate(self.config.tokenizer, self.config.template)

    @cached_property
    def rows(self) -> list[list[int]]:
        """The numbers of the samples in each row. The first access loads the data."""
        return pack_best_fit((np.diff(self.stream.offsets) - 1).tolist(), self.config.sequence)

    @cached_property
    def max_documents(self) -> int:
        """The largest number of documents in a row, including one document for the padding."""
        return max(map(len, self.rows)) + 1

    @cached_property
    def stream(self) -> TokenStream:
        """The tokens of all samples, with `_LABEL_BIT` set in labels. The first access loads the data."""
        config, split, digest = self.config, self.context.split, self.template.digest
        files, held_out = find_split_files(config, split)
        options = (config.train_on, config.sequence, config.too_long, config.field, config.held_out, config.max_held_out)
        stream, summary = load_tokens(
            find_cache_folder(config, files, held_out, ("chat", 7, digest, *options, split)) if digest else None,
            "uint32",
            sum(file.num_bytes for file in files),
            partial(read_documents, files, config, split, self.data_notes),
            partial(encode_conversations, self.template, config),
            partial(self._summarize, files),
        )
        self.stats = ChatStats(**summary["stats"])
        self.data_notes[:] = summary["notes"]
        return stream

    def _summarize(self, files: Sequence[DataFile], stats: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a dict with the sum of `stats` and notes. Raises PlanError "data-short", "held-out" or "chat-mask"."""
        total, split = ChatStats(), self.context.split
        for values in stats:
            total.add(ChatStats(**values))
        if not total.documents:
            raise _empty_split_error(split)
        is_all_trained = total.trained == total.tokens - total.samples
        if not total.samples or (self.config.train_on != "all" and is_all_trained):
            raise self._build_mask_error(next(read_documents(files, self.config, split)), total)
        notes = [*self.template.list_notes(), *self.data_notes]
        for reason, count in total.dropped.items():
            action = "cut" if reason == CUT_REASON else "dropped"
            notes.append(f"{count} samples are {action}, the first in `{total.first_dropped[reason]}`: {reason}")
        return {"stats": vars(total), "notes": notes}

    def _build_mask_error(self, conversation: Conversation, stats: ChatStats) -> PlanError:
        """Returns PlanError "chat-mask", whose message shows `conversation`, the first of the split."""
        problem = "every token has a label" if stats.samples else "no token of a conversation has a label"
        reasons = "; ".join(f"{count}: {reason}" for reason, count in stats.dropped.items())
        try:
            text = self.template.render(conversation.messages, conversation.tools)
        except ValueError as error:
            text = str(error)
        problem += f" ({reasons})" if reasons else ""
        message = f"{problem}; the first conversation, `{conversation.name}`, is {text[:500]!r}"
        hint = 'use the roles "user" and "assistant", or set `train_on = "all"` to train on every token'
        return PlanError("chat-mask", message, path=("data", "train_on"), hint=hint)

    def read_sample(self, index: int) -> dict[str, IntegerArray]:
        """Returns row `index`: tokens, labels and positions, int64 [sequence], and `cu_seqlens`, int32 [max_documents + 1].
        Token 0 with ignored labels pads the row. The padding is a separate document, so that no other token attends to it.
        """
        sequence = self.config.sequence
        tokens, labels = np.zeros(sequence, np.int64), np.full(sequence, IGNORE_INDEX)
        positions, starts, start = np.arange(sequence), [], 0
        for number in self.rows[index]:
            ids = self.stream.read(*self.stream.offsets[number : number + 2].tolist())
            stop = start + len(ids) - 1
            tokens[start:stop] = ids[:-1] % _LABEL_BIT
            labels[start:stop] = np.where(ids[1:] < _LABEL_BIT, IGNORE_INDEX, ids[1:] % _LABEL_BIT)
            positions[start:stop] -= start
            starts.append(start)
            start = stop
        positions[start:] -= start
        cu_seqlens = np.full(self.max_documents + 1, sequence, np.int32)
        cu_seqlens[: len(starts) + 1] = [*starts, start]
        return {"tokens": tokens, "labels": labels, "positions": positions, "cu_seqlens": cu_seqlens}

    @property
    def data_digest(self) -> str:
        """A digest of all tokens, labels and sample lengths."""
        return self.stream.digest

    @property
    def counts(self) -> dict[str, Any]:
        """The counts of conversations, tokens and positions in the split, by name. Loads the data."""
        num_positions, stats = len(self) * self.config.sequence, self.stats
        return {
            "documents": stats.documents,
            "tokens": stats.tokens,
            "trained": stats.trained,
            "positions": num_positions,
            "padding": num_positions - (stats.tokens - stats.samples),
            "longest": stats.longest,
            "dropped": dict(stats.dropped),
        }


_MAX_CHECKED_CONVERSATIONS = 64  # the maximum number of conversations that a check of more than `MAX_CHECK_BYTES` renders


@report_errors
def check_chat(config: ChatConfig, *, evaluates: bool, vocab_size: int | None = None) -> Iterator[Problem]:
    """Yields the problems of a `data.chat` table (`DatasetRecord.check`). vocab_size: the model's, or None. Renders all
    conversations, or only `_MAX_CHECKED_CONVERSATIONS` from the first file if the files together exceed `MAX_CHECK_BYTES`.
    """
    files, problems = find_document_files(config, "train")
    if config.held_out_files:
        held_out_files, held_out_problems = find_document_files(config, "held_out")
        files, problems = [*files, *held_out_files], [*problems, *held_out_problems]
    yield from problems
    if problems:
        return
    template = ChatDataset(config, DataContext()).template
    yield from check_vocabulary(vocab_size, template.vocab_size)
    if sum(file.num_bytes for file in files) > MAX_CHECK_BYTES:
        conversations = islice(read_conversations(files[0], config.field), _MAX_CHECKED_CONVERSATIONS)
        results = list(template.encode(conversations, config))
        if not any(sample.label_ranges for _, samples, _ in results for sample in samples):
            reasons = ", ".join(dict.fromkeys(reason for _, _, reason in results if reason))
            message = f"the first {len(results)} conversations have no tokens with labels{f': {reasons}' if reasons else ''}"
            yield Problem(("data", "train_on"), message, None, "chat-mask")
        if evaluates and not config.held_out and not config.held_out_files:
            raise _empty_split_error("held_out")
        return
    config.check_num_samples(len(ChatDataset(config, DataContext())))
    if evaluates:
        len(ChatDataset(config, DataContext(split="held_out")))


def _empty_split_error(split: Split) -> PlanError:
    if split == "held_out":
        hint = "set `held_out_files`, or increase `held_out`"
        return PlanError("held-out", "there is no held-out conversation to evaluate on", path=("evaluation",), hint=hint)
    return PlanError("data-short", "there is no conversation to train on", path=("data", "files"))
