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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
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
        if not isinstance(text, str):  # none, or several by name
            try:
                text = self.tokenizer.get_chat_template()
            except ValueError:
                hint = 'name a file with one: `template = "chat.jinja"`'
                raise PlanError(
                    "chat-template", f"`{path}` has no chat template", path=("data", "tokenizer"), hint=hint
                ) from None
        self._has_generation = _GENERATION.search(text) is not None

    @cached_property
    def vocab_size(self) -> int:
        """One above the highest token id, added tokens included."""
        return int(max(self.tokenizer.get_vocab().values())) + 1

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token with which the template ends a turn of the assistant; None if there is none."""
        try:
            before = self._ids([self.text(_PROBE[:1], None, prompt=True)])[0]
            whole = self._ids([self.text(_PROBE, None)])[0]
        except ValueError:  # a template may want other turns
            return self._eos
        special = [token for token in whole[len(before) :] if token in self._special]
        return special[-1] if special else self._eos

    @cached_property
    def _eos(self) -> int | None:
        token: int | None = self.tokenizer.eos_token_id
        return token

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset(self.tokenizer.all_special_ids) | {token for token, each in added.items() if each.special}

    def encode(self, conversations: Iterable[Conversation], config: ChatConfig) -> Iterator[Outcome]:
        """Yields the outcome of each conversation, in order."""
        pending = iter(conversations)
        while batch := list(islice(pending, BATCH)):
            yield from self._by_generation(batch, config) if self._uses_blocks(config) else self._by_prefixes(batch, config)

    def _uses_blocks(self, config: ChatConfig) -> bool:
        return self._has_generation and config.train_on != "all"

    def _by_generation(self, batch: Sequence[Conversation], config: ChatConfig) -> Iterator[Outcome]:
        for each in batch:
            try:
                encoded = self.tokenizer.apply_chat_template(
                    list(each.messages), tools=each.tools, return_dict=True, return_assistant_tokens_mask=True
                )
            except Exception as error:  # a template raises what it likes
                yield each, [], _reason(error)
                continue
            ids = list(encoded["input_ids"])
            turns = [self._trimmed(ids, turn) for turn in _runs(encoded["assistant_masks"])]
            num_turns = sum(message["role"] == "assistant" for message in each.messages)
            if each.first_trained and len(turns) != num_turns:
                yield from self._by_prefixes([each], config)
                continue
            if each.first_trained:
                turns = turns[num_turns - len(each.trained_turns) :]
            yield each, [Encoded(ids, turns[-1:] if config.train_on == "last" else turns)], ""

    def _by_prefixes(self, batch: Sequence[Conversation], config: ChatConfig) -> Iterator[Outcome]:
        """As `encode`, for conversations whose texts are tokenized together."""
        texts: list[str] = []
        plans: list[tuple[Conversation, list[tuple[int, int]], str]] = []  # a turn's texts are (before, up to)
        for each in batch:
            turns = (
                [] if config.train_on == "all" else each.trained_turns[-1:] if config.train_on == "last" else each.trained_turns
            )
            start, places = len(texts), []
            try:
                texts.append(self.text(each.messages, each.tools))
                for turn in turns:
                    texts.append(self.text(each.messages[:turn], each.tools, prompt=True))
                    is_last = turn + 1 == len(each.messages)
                    texts.append(texts[start] if is_last else self.text(each.messages[: turn + 1], each.tools))
                    places.append((len(texts) - 2, len(texts) - 1))
            except ValueError as error:
                del texts[start:]
                plans.append((each, [], str(error)))
                continue
            plans.append((each, [(start, start), *places], ""))
        ids = self._ids(texts)
        for each, places, reason in plans:
            if reason:
                yield each, [], reason
            elif config.train_on == "all":
                whole = ids[places[0][0]]
                yield each, [Encoded(whole, [(0, len(whole))])], ""
            else:
                samples, num_lost = self._samples(ids[places[0][0]], [(ids[before], ids[upto]) for before, upto in places[1:]])
                yield each, samples, "its template writes a turn otherwise than it asks for it" if num_lost else ""

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


def _reason(error: Exception) -> str:
    return f"its template refuses it: {str(error) or type(error).__name__}"


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the ranges of ones."""
    ends = [place for place in range(len(mask) + 1) if (place < len(mask) and mask[place]) != (place > 0 and mask[place - 1])]
    return list(zip(ends[::2], ends[1::2], strict=True))


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
    template = config.template if config.template is not None and config.template.exists() else None  # a run may be moved
    return Tokenized(Tokenizer(path, None), ChatTemplate(path, template).end_of_turn)
