"""Renders conversations by a chat template, and finds the tokens that are the assistant's; torch-free.

They are read from the template's `{% generation %}` blocks, where it has them, and else from prefixes:

    messages before the turn, with the generation prompt     <user> Hi <assistant>
    messages up to the turn                                  <user> Hi <assistant> Hello <end>
                                                                                   ^^^^^^^^^^^ trained

Both must be how the tokens of the conversation begin, token for token. Where they are not, because the template writes earlier
turns in another way once later ones follow, that turn becomes a sample that ends with it. If even that fails, the turn is left
out, and counted.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from hashlib import blake2b
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeAlias

from sley_core.api.data import TextIds
from sley_core.api.files import RANDOM_SETTINGS
from sley_core.errors import PlanError, PluginError
from sley_data.config import ChatConfig
from sley_data.conversations import Conversation, Message
from sley_data.tokenizer import Tokenized, Tokenizer

INSTALL = """install sley-data[chat], in a clone of Sley's repository: `pip install -e "packages/data[chat]"`"""

BATCH = 64
"""Conversations whose texts are tokenized in one call, on all cores."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_DATE = date(2024, 7, 26)
"""The date that Llama 3.1's template has as its default."""

_PROMPT = "the template's generation prompt is not how it begins that turn"
_FIRST = "it begins with the assistant, and where that answer begins is not known"
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@dataclass
class Encoded:
    """Tokens of one sample, and the ranges of those that are trained on, ascending and apart."""

    ids: list[int]
    trained: list[tuple[int, int]]


Outcome: TypeAlias = tuple[Conversation, list[Encoded], str]
"""A conversation, its samples, and why turns of it are in none, "" if all are in one."""


class ChatTemplate:
    """Renders conversations as a tokenizer's chat template does, and knows which tokens are the assistant's.

    Raises PluginError if `transformers` is not installed; PlanError if the folder has no tokenizer or no template.
    """

    def __init__(self, path: Path, template: Path | None = None) -> None:
        self.tokenizer = _tokenizer(path)
        if template is not None:
            try:
                self.tokenizer.chat_template = template.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                message = f"`{template}` cannot be read: {error}"
                raise PlanError("chat-template", message, path=("data", "template")) from None
        text = self.tokenizer.chat_template
        if not text:
            message, hint = f"`{path}` has no chat template", 'name a file with one: `template = "chat.jinja"`'
            raise PlanError("chat-template", message, path=("data", "tokenizer"), hint=hint)
        is_alone = isinstance(text, str)  # else several, by name
        self.tokenizer.chat_template = _dated(text) if is_alone else {name: _dated(each) for name, each in text.items()}

    @cached_property
    def vocab_size(self) -> int:
        """One above the highest token id, added tokens included."""
        return int(max(self.tokenizer.get_vocab().values())) + 1

    @cached_property
    def digest(self) -> str | None:
        """Differs if the tokens of some conversation may differ; None for a tokenizer that cannot be written as text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        versions = (version("transformers"), version("tokenizers"), version("jinja2"))
        text = repr((versions, backend.to_str(), self.tokenizer.chat_template, self.tokenizer.special_tokens_map))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token with which the template ends a turn of the assistant; None if there is none."""
        after: list[int] = []
        for token in self._probe[1]:
            after = [*after, token] if token in self._special else [] if self.tokenizer.decode([token]).strip() else after
        return after[-1] if after else None

    @cached_property
    def _probe(self) -> tuple[list[int], list[int], bool]:
        """The ids of a question, those of its answer with what the template writes around it, and whether there is a generation
        prompt; all empty for a template that wants other turns.
        """
        try:
            bare, asked, whole = self._ids(
                [self.text(_PROBE[:1], None), self.text(_PROBE[:1], None, prompt=True), self.text(_PROBE, None)]
            )
        except ValueError:
            return [], [], True
        return asked, whole[len(asked) :], asked != bare

    def remarks(self) -> list[str]:
        """Returns sentences for the user about what the template does not do."""
        _, answer, has_prompt = self._probe
        remarks = []
        if answer and self.end_of_turn is None:
            remarks.append("the chat template writes no special token at the end of a turn: a model will not learn to stop")
        if answer and not has_prompt and not self.tokenizer.decode(answer).strip().startswith(_PROBE[1]["content"]):
            remarks.append("the chat template has no generation prompt: what it writes before an answer is trained on, too")
        return remarks

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset(self.tokenizer.all_special_ids) | {token for token, each in added.items() if each.special}

    def encode(self, conversations: Iterable[Conversation], config: ChatConfig) -> Iterator[Outcome]:
        """Yields the outcome of each conversation, in order."""
        pending = iter(conversations)
        while batch := list(islice(pending, BATCH)):
            for has_blocks, group in groupby(batch, lambda each: self._has_blocks(each, config)):
                some = list(group)
                yield from self._by_blocks(some, config) if has_blocks else self._by_prefixes(some, config)

    def _has_blocks(self, conversation: Conversation, config: ChatConfig) -> bool:
        template: str = self.tokenizer.get_chat_template(tools=conversation.tools)
        return config.train_on != "all" and _GENERATION.search(template) is not None

    def _by_blocks(self, batch: Sequence[Conversation], config: ChatConfig) -> Iterator[Outcome]:
        """As `encode`, for conversations whose template has `{% generation %}` blocks.

        If there are not as many blocks as turns of the assistant, which block is whose is found by prefixes.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        for each in batch:
            try:
                rendered: Any = render_jinja_template(
                    conversations=[list(each.messages)],
                    tools=list(each.tools) if each.tools is not None else None,
                    chat_template=self.tokenizer.get_chat_template(tools=each.tools),
                    return_assistant_tokens_mask=True,
                    **self.tokenizer.special_tokens_map,
                )
            except Exception as error:  # a template raises what it likes
                yield each, [], _reason(error)
                continue
            (text,), (blocks,) = rendered
            if len(blocks) != len(each.assistants):
                yield from self._by_prefixes([each], config)
                continue
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
            wanted = _wanted(each, config)
            chosen = [block for block, number in zip(blocks, each.assistants, strict=True) if number in wanted]
            turns = [self._tokens_of(ids, offsets, block) for block in chosen]
            kept = [turn for turn in turns if turn is not None]
            yield each, [Encoded(ids, kept)], "" if len(kept) == len(turns) else "a token crosses the border of a turn"

    def _tokens_of(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], block: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Returns the range of the tokens of a block of text; None if a token begins before it and ends within."""
        first = bisect_right(offsets, block[0], key=lambda offset: offset[1])
        last = bisect_left(offsets, block[1], lo=first, key=lambda offset: offset[0])
        if first < len(ids) and offsets[first][0] < block[0] < block[1]:
            return None
        return self._trimmed(ids, (first, last))

    def _by_prefixes(self, batch: Sequence[Conversation], config: ChatConfig) -> Iterator[Outcome]:
        """As `encode`, for conversations whose texts are tokenized together."""
        texts: list[str] = []
        plans: list[tuple[Conversation, list[tuple[int, int]], str]] = []  # a turn's texts are (before, up to)
        for each in batch:
            turns = [] if config.train_on == "all" else _wanted(each, config)
            start, places, reason = len(texts), [], ""
            try:
                texts.append(self.text(each.messages, each.tools))
                for turn in turns:
                    is_last = turn + 1 == len(each.messages)
                    upto = texts[start] if is_last else self.text(each.messages[: turn + 1], each.tools)
                    before = self.text(each.messages[:turn], each.tools, prompt=True) if turn else self._before_first(upto)
                    if before is None:
                        reason = _FIRST
                        continue
                    texts += [before, upto]
                    places.append((len(texts) - 2, len(texts) - 1))
            except ValueError as error:
                del texts[start:]
                plans.append((each, [], str(error)))
                continue
            plans.append((each, [(start, start), *places], reason))
        ids = self._ids(texts)
        for each, places, reason in plans:
            if reason and not places[1:]:
                yield each, [], reason
            elif config.train_on == "all":
                whole = ids[places[0][0]]
                yield each, [Encoded(whole, [(0, len(whole))])], ""
            else:
                samples, num_lost = self._samples(ids[places[0][0]], [(ids[before], ids[upto]) for before, upto in places[1:]])
                yield each, samples, _PROMPT if num_lost else reason

    def _before_first(self, text: str) -> str | None:
        """Returns what comes before the answer in the text of a first one, which no template renders alone: all up to the
        generation prompt; None if that is not in the text.
        """
        try:
            bare, asked = (self.text(_PROBE[:1], None, prompt=prompt) for prompt in (False, True))
        except ValueError:
            return None
        prompt = asked[len(bare) :] if asked.startswith(bare) else ""
        place = text.find(prompt)
        return text[: place + len(prompt)] if prompt and place >= 0 else None

    def _samples(self, whole: list[int], turns: Sequence[tuple[list[int], list[int]]]) -> tuple[list[Encoded], int]:
        """Returns the samples of a conversation, and how many of its turns are in none.

        turns: of each the tokens before it, with the generation prompt, and those up to its end.
        """
        kept, alone, num_lost = [], [], 0
        for before, upto in turns:
            if len(before) >= len(upto) or upto[: len(before)] != before:
                num_lost += 1
            elif whole[: len(upto)] == upto:
                kept.append(self._trimmed(whole, (len(before), len(upto))))
            else:
                alone.append(Encoded(upto, [self._trimmed(upto, (len(before), len(upto)))]))
        return [*alone, *([Encoded(whole, kept)] if kept or not turns else [])], num_lost

    def _trimmed(self, ids: Sequence[int], turn: tuple[int, int]) -> tuple[int, int]:
        """Returns the range of a turn that ends with its end-of-turn token, if the template writes one there.

        What a template writes after that token, such as a line end, belongs to no turn.
        """
        start, stop = turn
        if self.end_of_turn is None:
            return turn
        if stop < len(ids) and ids[stop] == self.end_of_turn:  # a `{% generation %}` block may end before it
            return start, stop + 1
        for place in range(stop - 1, start - 1, -1):
            if ids[place] == self.end_of_turn:
                return start, place + 1
            if self.tokenizer.decode([ids[place]]).strip():
                break
        return turn

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        """Returns the rendered messages; raises ValueError if the template refuses them. prompt: with the generation prompt."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(_reason(error)) from None
        return text

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of texts that have their special tokens already."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return ids


def _wanted(conversation: Conversation, config: ChatConfig) -> list[int]:
    """Returns the numbers of the messages to train on."""
    return conversation.trained_turns[-1:] if config.train_on == "last" else conversation.trained_turns


def _reason(error: Exception) -> str:
    return f"its template refuses it: {str(error) or type(error).__name__}"


def _dated(template: str) -> str:
    """Returns a template that writes one date, not today's: the tokens must be the same on every day."""
    return _NOW.sub(lambda match: repr(_DATE.strftime(match[2])), template)


def _tokenizer(path: Path) -> Any:
    try:
        import jinja2  # noqa: F401
        from transformers import AutoTokenizer
    except ImportError:
        message = "`data.chat` needs the packages `transformers` and `jinja2`"
        raise PluginError("transformers-missing", message, path=("data", "tokenizer"), hint=INSTALL) from None
    if not path.is_dir():
        hint = "it is a folder as `save_pretrained` writes it; nothing is downloaded, so give no name on a hub"
        raise PlanError("tokenizer-missing", f"there is no folder `{path}`", path=("data", "tokenizer"), hint=hint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many
        why = (str(error).splitlines() or [repr(error)])[0]
        message = f"`{path}` is no tokenizer that transformers can load: {why}"
        raise PlanError("tokenizer-invalid", message, path=("data", "tokenizer")) from None
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    for name in RANDOM_SETTINGS:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)
    return tokenizer


def text_ids(config: ChatConfig, tokenizer: Path | None) -> TextIds:
    """Returns the ids of text, a turn's end ending it: `DatasetRecord.text_ids`. tokenizer: is used in place of the table's."""
    path = config.tokenizer if tokenizer is None else tokenizer
    return Tokenized(Tokenizer(path, None), ChatTemplate(path, config.template).end_of_turn)
