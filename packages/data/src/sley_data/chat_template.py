"""Renders conversations with a chat template, and finds the tokens of the assistant. Does not import torch.

Templates with `{% generation %}` blocks mark these tokens. For other templates, two rendered prefixes of the conversation
delimit the tokens of a turn:

    messages before the turn, with the generation prompt     <user> Hi <assistant>
    messages up to the turn                                  <user> Hi <assistant> Hello <end>
                                                                                   ^^^^^^^^^^^ trained

The tokens of the first prefix must be the first tokens of the second one; otherwise the turn is dropped and counted. The tokens
of the second prefix should be the first tokens of the conversation. If they are not, because the template renders a turn
differently when more turns follow, the second prefix becomes a separate sample.
"""

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
from sley_core.errors import PlanError, PluginError, install_hint
from sley_data.documents import Conversation, Message
from sley_data.plugin import ChatConfig
from sley_data.tokenizer import PromptTokenizer, Tokenizer

_BATCH_SIZE = 64  # the number of conversations whose texts are tokenized in one call

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # matches the start of a block around an assistant's turn
_CURRENT_DATE = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")  # finds the current date; group 2 is its format
_FIXED_DATE = date(2024, 7, 26)
"""The date that replaces the current date in templates: the default date of Llama 3.1's template."""

_PROMPT_DIFFERS_REASON = "the template does not begin the turn with its generation prompt"  # why a turn is dropped
_NO_PROMPT_REASON = "the conversation begins with the assistant, and has no prompt for its first turn"  # why a turn is dropped
_PROBE_MESSAGES = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
"""The conversation that is rendered to find out which features a template has."""


@dataclass
class EncodedSample:
    """A tokenized sample. label_ranges: the ranges [start, stop) of the tokens that are labels, ascending and disjoint."""

    ids: list[int]
    label_ranges: list[tuple[int, int]]


EncodingResult: TypeAlias = tuple[Conversation, list[EncodedSample], str]
"""A conversation, its samples, and the reason why turns are dropped, or "" if all turns are kept."""


class ChatTemplate:
    """Renders conversations with the chat template of a tokenizer, and finds the tokens of the assistant. path: the tokenizer's
    folder. template: a template file that replaces the tokenizer's template, or None. Raises PluginError if `transformers` or
    `jinja2` is not installed, and PlanError if `path` has no tokenizer or no template, or if `template` cannot be read.
    """

    def __init__(self, path: Path, template: Path | None = None) -> None:
        self.tokenizer = _load_tokenizer(path)
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
        if isinstance(text, str):
            self.tokenizer.chat_template = _fix_date(text)
        else:  # several templates by name
            self.tokenizer.chat_template = {name: _fix_date(template_text) for name, template_text in text.items()}

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id, including added tokens, plus 1."""
        return int(max(self.tokenizer.get_vocab().values())) + 1

    @cached_property
    def digest(self) -> str | None:
        """A digest of the tokenizer, template and versions, which determine all tokens; None for a slow (Python) tokenizer."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        versions = (version("transformers"), version("tokenizers"), version("jinja2"))
        text = repr((versions, backend.to_str(), self.tokenizer.chat_template, self.tokenizer.special_tokens_map))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The id of the special token with which the template ends an assistant turn; None if the template writes none."""
        end: int | None = None
        for token in self._probe_ids[1]:
            if token in self._special_ids:
                end = token
            elif self.tokenizer.decode([token]).strip():
                end = None
        return end

    @cached_property
    def _probe_ids(self) -> tuple[list[int], list[int], bool]:
        """The ids of the question in `_PROBE_MESSAGES` with the generation prompt, the ids of the answer, and whether the
        template has a generation prompt. Both lists of ids are empty if the template refuses this conversation.
        """
        try:
            question, prompt, full = self._tokenize(
                [
                    self.render(_PROBE_MESSAGES[:1], None),
                    self.render(_PROBE_MESSAGES[:1], None, add_generation_prompt=True),
                    self.render(_PROBE_MESSAGES, None),
                ]
            )
        except ValueError:
            return [], [], True
        return prompt, full[len(prompt) :], prompt != question

    def list_notes(self) -> list[str]:
        """Returns a sentence for the user about each useful feature that the template lacks."""
        _, answer, has_prompt = self._probe_ids
        remarks = []
        if answer and self.end_of_turn_id is None:
            remarks.append("the chat template writes no special token after a turn, so the model will not learn to stop")
        if answer and not has_prompt and not self.tokenizer.decode(answer).strip().startswith(_PROBE_MESSAGES[1]["content"]):
            remarks.append(
                "the chat template has no generation prompt, so the text that it writes before an answer has labels too"
            )
        return remarks

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset(self.tokenizer.all_special_ids) | {token for token, content in added.items() if content.special}

    def encode(self, conversations: Iterable[Conversation], config: ChatConfig) -> Iterator[EncodingResult]:
        """Yields the samples of each conversation, in order. config: the table that selects the turns with labels."""
        pending = iter(conversations)
        while batch := list(islice(pending, _BATCH_SIZE)):
            for has_blocks, group in groupby(batch, lambda conversation: self._has_generation_blocks(conversation, config)):
                encode = self._encode_by_blocks if has_blocks else self._encode_by_prefixes
                yield from encode(list(group), config)

    def _has_generation_blocks(self, conversation: Conversation, config: ChatConfig) -> bool:
        """Returns whether labels come from `{% generation %}` blocks of the template of this conversation."""
        template: str = self.tokenizer.get_chat_template(tools=conversation.tools)
        return config.train_on != "all" and _GENERATION.search(template) is not None

    def _encode_by_blocks(self, batch: Sequence[Conversation], config: ChatConfig) -> Iterator[EncodingResult]:
        """Yields the samples of conversations. The labels are the tokens in `{% generation %}` blocks. If the number of blocks
        in a conversation is not the number of assistant turns, the labels come from prefixes instead.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        for conversation in batch:
            try:
                rendered: Any = render_jinja_template(
                    conversations=[list(conversation.messages)],
                    tools=list(conversation.tools) if conversation.tools is not None else None,
                    chat_template=self.tokenizer.get_chat_template(tools=conversation.tools),
                    return_assistant_tokens_mask=True,
                    **self.tokenizer.special_tokens_map,
                )
            except Exception as error:  # a template may raise anything
                yield conversation, [], _describe_refusal(error)
                continue
            (text,), (blocks,) = rendered
            if len(blocks) != len(conversation.assistant_turns):
                yield from self._encode_by_prefixes([conversation], config)
                continue
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
            turns = _select_trained_turns(conversation, config)
            blocks = [block for block, turn in zip(blocks, conversation.assistant_turns, strict=True) if turn in turns]
            ranges = [self._find_token_range(ids, offsets, block) for block in blocks]
            label_ranges = [token_range for token_range in ranges if token_range is not None]
            reason = "" if len(label_ranges) == len(ranges) else "a token crosses the border of a turn"
            yield conversation, [EncodedSample(ids, label_ranges)], reason

    def _find_token_range(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], block: tuple[int, int]
    ) -> tuple[int, int] | None:
        """Returns the range of the tokens in `block`, a range of the text, or None if a token crosses the start of `block`."""
        start = bisect_right(offsets, block[0], key=lambda offset: offset[1])
        stop = bisect_left(offsets, block[1], lo=start, key=lambda offset: offset[0])
        if start < len(ids) and offsets[start][0] < block[0] < block[1]:
            return None
        return self._trim_turn(ids, (start, stop))

    def _encode_by_prefixes(self, batch: Sequence[Conversation], config: ChatConfig) -> Iterator[EncodingResult]:
        """Yields the samples of conversations, with labels found from the prefixes of turns. Tokenizes all texts together."""
        texts: list[str] = []
        rendered: list[tuple[Conversation, int, str]] = []  # with the number of texts, and the reason for dropped turns
        for conversation in batch:
            try:
                conversation_texts, reason = self._render_prefixes(conversation, config)
            except ValueError as error:
                conversation_texts, reason = [], str(error)
            rendered.append((conversation, len(conversation_texts), reason))
            texts += conversation_texts
        all_ids = iter(self._tokenize(texts))
        for conversation, num_texts, reason in rendered:
            ids, *prefixes = [*islice(all_ids, num_texts)] or [[]]
            if reason and not prefixes:
                yield conversation, [], reason
            elif config.train_on == "all":
                yield conversation, [EncodedSample(ids, [(0, len(ids))])], ""
            else:
                samples, num_dropped = self._make_samples(ids, list(zip(prefixes[::2], prefixes[1::2], strict=True)))
                yield conversation, samples, _PROMPT_DIFFERS_REASON if num_dropped else reason

    def _render_prefixes(self, conversation: Conversation, config: ChatConfig) -> tuple[list[str], str]:
        """Returns the text of a conversation, followed by two texts for each trained turn: up to its generation prompt, and up
        to its end. Also returns why a turn has no such texts, or "". Raises ValueError if the template refuses messages.
        """
        messages, tools, reason = conversation.messages, conversation.tools, ""
        texts = [self.render(messages, tools)]
        for turn in [] if config.train_on == "all" else _select_trained_turns(conversation, config):
            if turn == 0:
                reason = _NO_PROMPT_REASON
                continue
            is_last = turn + 1 == len(messages)
            texts.append(self.render(messages[:turn], tools, add_generation_prompt=True))
            texts.append(texts[0] if is_last else self.render(messages[: turn + 1], tools))
        return texts, reason

    def _make_samples(self, full: list[int], turns: Sequence[tuple[list[int], list[int]]]) -> tuple[list[EncodedSample], int]:
        """Returns the samples of a conversation, and the number of dropped turns. full: the tokens of the whole conversation.
        turns: for each trained turn, the tokens up to its generation prompt, and the tokens up to its end.
        """
        ranges, separate_samples, num_dropped = [], [], 0
        for prompt, prefix in turns:
            turn = (len(prompt), len(prefix))
            if len(prompt) >= len(prefix) or prefix[: len(prompt)] != prompt:
                num_dropped += 1
            elif full[: len(prefix)] == prefix:
                ranges.append(self._trim_turn(full, turn))
            else:
                separate_samples.append(EncodedSample(prefix, [self._trim_turn(prefix, turn)]))
        return [*separate_samples, *([EncodedSample(full, ranges)] if ranges or not turns else [])], num_dropped

    def _trim_turn(self, ids: Sequence[int], turn: tuple[int, int]) -> tuple[int, int]:
        """Returns the range of a turn's tokens, up to its end-of-turn token. Leaves out later text, such as a line break."""
        start, stop = turn
        if self.end_of_turn_id is None:
            return turn
        if stop < len(ids) and ids[stop] == self.end_of_turn_id:  # a `{% generation %}` block may end before this token
            return start, stop + 1
        for index in range(stop - 1, start - 1, -1):
            if ids[index] == self.end_of_turn_id:
                return start, index + 1
            if self.tokenizer.decode([ids[index]]).strip():
                break
        return turn

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, add_generation_prompt: bool = False) -> str:
        """Returns the text of `messages`, and of the start of an answer if `add_generation_prompt` is set. tools: the tools
        that the assistant may call, or None. Raises ValueError if the template refuses the messages.
        """
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), **options))
        except Exception as error:  # a template may raise anything
            raise ValueError(_describe_refusal(error)) from None

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return ids


def _select_trained_turns(conversation: Conversation, config: ChatConfig) -> list[int]:
    """Returns the indices of the messages that have labels with the plan's `train_on`."""
    return conversation.trained_turns[-1:] if config.train_on == "last" else conversation.trained_turns


def _describe_refusal(error: Exception) -> str:
    return f"the template refuses the conversation: {str(error) or type(error).__name__}"


def _fix_date(template: str) -> str:
    """Returns `template` with `_FIXED_DATE` instead of the current date, so that the tokens are the same every day."""
    return _CURRENT_DATE.sub(lambda match: repr(_FIXED_DATE.strftime(match[2])), template)


def _load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer in the folder `path`, without random segmentation. Raises the errors of `ChatTemplate`."""
    try:
        import jinja2  # noqa: F401
        from transformers import AutoTokenizer
    except ImportError:
        message = "`data.chat` needs the packages `transformers` and `jinja2`"
        hint = install_hint("data", "chat")
        raise PluginError("transformers-missing", message, path=("data", "tokenizer"), hint=hint) from None
    if not path.is_dir():
        hint = "use a local folder that `save_pretrained` has written, since Sley downloads no tokenizers"
        raise PlanError("tokenizer-missing", f"the folder `{path}` does not exist", path=("data", "tokenizer"), hint=hint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many types of exceptions
        reason = (str(error).splitlines() or [repr(error)])[0]
        message = f"transformers cannot load the tokenizer `{path}`: {reason}"
        raise PlanError("tokenizer-invalid", message, path=("data", "tokenizer")) from None
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    for name in RANDOM_SETTINGS:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)
    return tokenizer


def load_text_ids(config: ChatConfig, tokenizer: Path | None) -> TextIds:
    """Returns the `TextIds` of the tokenizer at path `tokenizer`, or of the table's tokenizer if the path is None. The
    template's end-of-turn token ends a text. Implements `DatasetRecord.text_ids`.
    """
    path = config.tokenizer if tokenizer is None else tokenizer
    return PromptTokenizer(Tokenizer(path, None), ChatTemplate(path, config.template).end_of_turn_id)
