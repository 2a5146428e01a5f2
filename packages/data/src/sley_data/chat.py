"""Packs conversations whole into rows of one length, with their labels and boundaries; torch-free."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from sley_core.api.data import IGNORED, DataContext
from sley_core.errors import PlanError
from sley_data import cache
from sley_data.chat_template import ChatTemplate, Encoded
from sley_data.config import ChatConfig
from sley_data.conversations import Conversation, chat_files, nothing_left, read_conversations
from sley_data.files import deciding_files
from sley_data.streams import map_tokens


@dataclass
class Fates:
    """What became of the conversations of a split.

    documents: conversations read. samples: sequences of tokens that they gave, more where a template rewrites earlier turns.
    tokens, trained: of those that are packed. longest: tokens of the longest conversation. dropped: conversations by reason.
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

    def add(self, other: Fates) -> None:
        """Adds those of conversations that follow."""
        for name in ("documents", "samples", "tokens", "trained", "copied"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        self.dropped.update(other.dropped)
        self.first_dropped = {**other.first_dropped, **self.first_dropped}

    def drop(self, reason: str, name: str) -> None:
        """Counts one conversation."""
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, name)

    def notes(self) -> list[str]:
        """Returns sentences for the user."""
        notes = list(self.remarks)
        if self.copied:
            notes.append(f"{self.copied} conversations of `files` are in `held_out_files` too: they are not trained on")
        for reason, count in self.dropped.items():
            first = self.first_dropped[reason]
            notes.append(f"{count} samples are {'cut' if reason == CUT else 'left out'}, `{first}` first: {reason}")
        return notes


_TRAINED = 1 << 31
"""Is added to a token that is trained on."""

TOO_LONG = "longer than `sequence`"
CUT = "longer than `sequence`, and cut there"
NOT_TRAINED = "nothing in it is trained on"


class ChatRows:
    """The rows of a split: whole conversations, packed by best fit into `sequence` positions each.

    A conversation of n tokens takes n - 1 positions: its last token is a label only. `parts` hold the tokens of all
    conversations, with `_TRAINED` added to those that are trained on, and `rows[r]` the numbers of the conversations of row r.
    Construction reads, renders and tokenizes all, or maps what is kept of that (see `cache`). Raises PlanError "data-short"
    without a conversation, "data-too-long" for one that the plan refuses, and "chat-mask" if no token, or each, is trained on.
    """

    def __init__(self, config: ChatConfig, context: DataContext, template: ChatTemplate | None = None) -> None:
        """template: the table's, if it is loaded already."""
        self.sequence = config.sequence
        self.template = template or ChatTemplate(config.tokenizer, config.template)
        self.fates = Fates()
        self._config, self._split = config, context.split
        self._first: Conversation | None = None
        pairs = self._cached_parts() or self._tokenized()
        self.parts = [ids for ids, _ in pairs]
        self._starts = [0, *accumulate(map(len, self.parts))]
        lengths = [length for _, part in pairs for length in part]
        self.offsets = array("q", [0, *accumulate(lengths)])
        self.rows = best_fit([length - 1 for length in lengths], config.sequence)
        self.max_documents = max(map(len, self.rows)) + 1  # the last is the padding

    def _cached_parts(self) -> list[tuple[Sequence[int], Sequence[int]]] | None:
        """Returns the tokens, mapped, and the sample lengths of each part in the cache folder; None if they are not kept."""
        config = self._config
        files, held_out = deciding_files(config, self._split, chat_files)
        options = (
            config.train_on,
            config.sequence,
            config.too_long,
            config.field,
            config.held_out,
            config.largest_share,
            self._split,
        )
        digest = self.template.digest
        folder = cache.cache_folder(
            config.cache if digest else "none", files, held_out, ("chat", 4, digest, *options), cache.WORTH_BYTES
        )
        if folder is None:
            return None

        def summarize(parts: Sequence[cache.Part]) -> dict[str, Any]:
            for part in parts:
                for stats in part.read_stats():
                    self.fates.add(_fates(stats))
            self._check()
            return {"fates": vars(self.fates)}

        encode = partial(encode_conversations, self.template, config)
        try:
            num_bytes = sum(file.num_bytes for file in files)
            complete = cache.prepare(folder, self._read(), lambda each: each.content.size, encode, num_bytes, summarize)
            parts = [_map_part(part) for part in cache.part_files(folder, complete["parts"])]
        except OSError as error:
            cache.say(f"the tokens are not kept in {folder}: {error}")
            return None
        self.fates = _fates(complete["fates"])
        return parts

    def _tokenized(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Returns the tokens of all conversations, and the length of each, as one part; counts their fates."""
        ids, lengths, stats = encode_conversations(self.template, self._config, self._read())
        self.fates.add(_fates(stats))
        self._check()
        return [(ids, lengths)]

    def _read(self) -> Iterator[Conversation]:
        """Yields the split's conversations; counts those that are left out as copies."""
        self.fates, self._first = Fates(remarks=self.template.remarks()), None
        for conversation, is_chosen in read_conversations(self._config, self._split):
            if is_chosen:
                self._first = self._first or conversation
                yield conversation
            elif self._split == "train" and not self._config.largest_share:
                self.fates.copied += 1

    def _check(self) -> None:
        """Raises PlanError if there is no conversation, or if no token, or each, is trained on."""
        if self._first is None:
            raise nothing_left(self._config, self._split)
        has_one_mask = self.fates.trained == self.fates.tokens - self.fates.samples
        if not self.fates.samples or (self._config.train_on != "all" and has_one_mask):
            raise self._no_mask(self._first)

    def _no_mask(self, first: Conversation) -> PlanError:
        """Returns the PlanError "chat-mask", which shows the first conversation."""
        which = "all tokens are trained on" if self.fates.samples else "no conversation has a token to train on"
        reasons = "; ".join(f"{count}: {reason}" for reason, count in self.fates.dropped.items())
        try:
            shown = self.template.text(first.messages, first.tools)
        except ValueError as error:
            shown = str(error)
        message = f"{which}{f' ({reasons})' if reasons else ''}; the first conversation, `{first.name}`, is {shown[:500]!r}"
        hint = 'are its roles "user" and "assistant"? `train_on = "all"` trains on every token'
        return PlanError("chat-mask", message, path=("data", "train_on"), hint=hint)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict[str, list[int]]:
        """Returns row `index`, each [sequence]: tokens, labels and positions; and `cu_seqlens` [max_documents + 1].

        After the conversations come token 0 with ignored labels, a document of its own, so that nothing attends to it.
        """
        tokens: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        starts = []
        for number in self.rows[index]:
            start, stop = self.offsets[number], self.offsets[number + 1]
            starts.append(len(tokens))
            part = bisect_right(self._starts, start) - 1
            begin = self._starts[part]
            ids = self.parts[part][start - begin : stop - begin]
            tokens += [token % _TRAINED for token in ids[:-1]]
            labels += [token - _TRAINED if token >= _TRAINED else IGNORED for token in ids[1:]]
            positions += range(stop - start - 1)
        left = self.sequence - len(tokens)
        starts.append(len(tokens))
        starts += [self.sequence] * (self.max_documents + 1 - len(starts))
        padding = [0] * left, [IGNORED] * left, range(left)
        return {
            "tokens": tokens + padding[0],
            "labels": labels + padding[1],
            "positions": [*positions, *padding[2]],
            "cu_seqlens": starts,
        }

    @property
    def digest(self) -> str:
        """Differs if a token, what is trained on, or where a conversation ends differs."""
        digest = blake2b(digest_size=16)
        for part in (*self.parts, self.offsets):
            digest.update(memoryview(part))  # type: ignore[arg-type]  # an array, or a view of one
        return digest.hexdigest()

    @property
    def counts(self) -> dict[str, Any]:
        """The counts of `DataRows`."""
        fates = self.fates
        return {
            "documents": fates.documents,
            "tokens": fates.tokens,
            "trained": fates.trained,
            "positions": len(self.rows) * self.sequence,
            "padding": len(self.rows) * self.sequence - (fates.tokens - fates.samples),
            "longest": fates.longest,
            "dropped": dict(fates.dropped),
        }


def encode_conversations(
    template: ChatTemplate, config: ChatConfig, conversations: Iterable[Conversation]
) -> tuple[array[int], array[int], dict[str, Any]]:
    """Returns the tokens of conversations, the length of each sample, and the fates of the conversations as a dict."""
    ids, lengths, fates = array("I"), array("q"), Fates()
    for conversation, samples, reason in template.encode(conversations, config):
        fates.documents += 1
        if reason:
            fates.drop(reason, conversation.name)
        for sample in samples:
            _append_sample(config, conversation, sample, ids, lengths, fates)
    return ids, lengths, vars(fates)


def _append_sample(
    config: ChatConfig, conversation: Conversation, sample: Encoded, ids: array[int], lengths: array[int], fates: Fates
) -> None:
    """Appends a sample of a conversation, or counts why it is dropped."""
    fates.longest = max(fates.longest, len(sample.ids))
    limit = config.sequence + 1
    if len(sample.ids) > limit:
        if config.too_long == "refuse":
            message = f"`{conversation.name}` has {len(sample.ids)} tokens, more than `sequence` has positions"
            hint = 'raise `sequence`, or set `too_long` to "drop" or "cut"'
            raise PlanError("data-too-long", message, path=("data", "too_long"), hint=hint)
        fates.drop(TOO_LONG if config.too_long == "drop" else CUT, conversation.name)
        if config.too_long == "drop":
            return
    marked = list(sample.ids)
    for start, stop in sample.trained:
        marked[start:stop] = [token + _TRAINED for token in marked[start:stop]]
    num_trained = sum(token >= _TRAINED for token in marked[1:limit])  # the first token is no label
    if not num_trained:
        fates.drop(NOT_TRAINED, conversation.name)
        return
    ids.extend(marked[:limit])
    lengths.append(len(marked[:limit]))
    fates.samples += 1
    fates.tokens += min(len(sample.ids), limit)
    fates.trained += num_trained


def _fates(values: dict[str, Any]) -> Fates:
    """Returns the fates with the attributes `values`, which may come from JSON."""
    return Fates(**{**values, "dropped": Counter(values["dropped"])})


def _map_part(part: cache.Part) -> tuple[Sequence[int], Sequence[int]]:
    if not part.tokens.stat().st_size:
        return array("I"), array("q")
    return map_tokens(part.tokens, "I"), array("q", part.lengths.read_bytes())


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Returns bins of numbers of `lengths`, each of at most `size` together: best fit, the longest first.

    A bin's numbers ascend, and bins are in the order of their first ones. Every length is between 1 and `size`. Best-fit
    decreasing needs at most 11/9 of the fewest bins, and a few more (Johnson et al., 1974).
    """
    bins: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(size + 1)]  # bins, by what is left in them
    spaces = 0  # bit s is set if some bin has s left
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        enough = spaces >> length
        space = length + (enough & -enough).bit_length() - 1 if enough else size
        if enough:
            chosen = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(number)
        by_space[space - length].append(chosen)
        if space > length:  # a full bin takes no more
            spaces |= 1 << space - length
    return sorted(map(sorted, bins))
