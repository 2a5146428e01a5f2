"""Reads conversations: the messages of a row, in the form that chat templates take; torch-free.

    messages                  [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]
    conversations             the same, or ShareGPT's [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]
    prompt and completion     two texts, or two lists of messages; only the completion is trained on

Further keys of a message (`tool_calls`, `name`, `reasoning_content`, ...) and a row's `tools` go to the template as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from sley_core.api.data import Split
from sley_core.errors import PlanError
from sley_data.config import ChatConfig
from sley_data.documents import Content, among, chooser, content_of
from sley_data.files import File, Found, as_error, row_files
from sley_data.rows import bad_row, rows_of

Message = dict[str, Any]

KEYS = ("messages", "conversations", "prompt", "completion", "system", "tools")

SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Roles by ShareGPT's names for them."""


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    name: its file and row. first_trained: the number of the first message that may be trained on.
    """

    name: str
    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    first_trained: int = 0

    @property
    def trained_turns(self) -> list[int]:
        """The numbers of the assistant's messages that may be trained on: not those of `weight` 0."""
        wanted = (number for number in self.assistants if number >= self.first_trained)
        return [number for number in wanted if self.messages[number].get("weight") != 0]

    @property
    def assistants(self) -> list[int]:
        """The numbers of the assistant's messages."""
        return [number for number, each in enumerate(self.messages) if each["role"] == "assistant"]

    @cached_property
    def content(self) -> Content:
        """What identifies it: all of its messages and tools."""
        text = json.dumps([self.messages, self.tools], sort_keys=True, default=str).encode()
        return content_of(text)


def chat_files(config: ChatConfig, split: Split) -> Found:
    """Returns the files that hold a split: `files` for both without `held_out_files`; and their problems."""
    key = "held_out_files" if split == "held_out" and config.held_out_files else "files"
    return row_files(getattr(config, key), ("data", key))


def read_conversations(config: ChatConfig, split: Split) -> Iterator[tuple[Conversation, bool]]:
    """Yields the conversations of the files of a split, in order, and of each whether it belongs to the split.

    Raises PlanError with every file that has a problem, or with the first row that is no conversation.
    """
    is_chosen = chooser(config, split, lambda table: (each.content for each in _all_of(table, "held_out")))
    for conversation in _all_of(config, split):
        yield conversation, is_chosen is None or is_chosen(conversation.content)


def _all_of(config: ChatConfig, split: Split) -> Iterator[Conversation]:
    files, problems = chat_files(config, split)
    if problems:
        raise as_error(problems)
    return chain.from_iterable(conversations_in(file, config.field) for file in files)


def conversations_in(file: File, field: str | None) -> Iterator[Conversation]:
    """Yields the conversations of a file. field: the key of the messages, None for the usual ones.

    Raises PlanError "data-json" for a row that is no conversation, with what its keys are.
    """
    columns = KEYS if field is None else (field, "system", "tools")
    for number, row in rows_of(file, columns if file.is_table else None):
        try:
            yield _conversation(row, field, f"{file.name}#{number}")
        except (ValueError, RecursionError) as error:
            raise bad_row(file, number, str(error)) from None


def _conversation(row: dict[str, Any], field: str | None, name: str) -> Conversation:
    """Returns the conversation of a row; raises ValueError that says why it is none."""
    tools = row.get("tools")
    if isinstance(tools, str):  # tables have no type for a schema of any form
        tools = json.loads(tools) if tools.strip() else None
    tools = tools or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError("has `tools` that are not a list")
    key = field if field is not None else next((key for key in ("messages", "conversations") if key in row), None)
    if key is not None and key in row:
        messages = _messages(row[key], key)
        if isinstance(row.get("system"), str) and row["system"] and (not messages or messages[0]["role"] != "system"):
            messages.insert(0, {"role": "system", "content": row["system"]})
        return Conversation(name, messages, tools)
    if field is None and "prompt" in row and "completion" in row:
        prompt = _messages(row["prompt"], "prompt", role="user")
        return Conversation(name, [*prompt, *_messages(row["completion"], "completion", role="assistant")], tools, len(prompt))
    wanted = f"`{field}`" if field is not None else "`messages`, `conversations`, or `prompt` and `completion`"
    raise ValueError(f"has no {wanted}; its keys are {', '.join(f'`{key}`' for key in row) or 'none'}")


def _messages(value: Any, key: str, role: str | None = None) -> list[Message]:
    """Returns a list of messages. role: that of a plain text, which is one message; None if a text is none."""
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, str):  # some tables keep them as JSON
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list):
        raise ValueError(f"has `{key}` that is no list of messages")
    return [_message(each, number) for number, each in enumerate(value, start=1)]


def _message(value: Any, number: int) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"has as message {number} no object with `role` and `content`")
    message = {key: inner for key, inner in value.items() if inner is not None}
    if "role" not in message and isinstance(message.get("from"), str):
        name = message.pop("from")
        if name not in SHAREGPT:
            raise ValueError(f"has as message {number} one `from` {name!r}; known are {', '.join(map(repr, SHAREGPT))}")
        message["role"] = SHAREGPT[name]
        message["content"] = message.pop("value", None)
    if not isinstance(message.get("role"), str):
        raise ValueError(f"has no `role` in message {number}")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_text_of(part, number) for part in content)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"has no text as `content` of message {number}")
    for call in message.get("tool_calls") or ():
        _parse_arguments(call)
    json.dumps(message, ensure_ascii=False, default=str).encode()  # half of a surrogate pair is a ValueError
    return message


def _parse_arguments(call: Any) -> None:
    """Turns the arguments of a tool call from JSON, which OpenAI's are, into the object that templates write."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return
        if isinstance(arguments, dict):
            function["arguments"] = arguments


def _text_of(part: Any, number: int) -> str:
    """Returns the text of one part of a content; raises ValueError for an image or sound."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"has a part of type {kind!r} in message {number}; text alone is trained on")


def describe_overlap(own: ChatConfig, evaluated: ChatConfig) -> str:
    """Says how many held-out conversations of `evaluated` a run on `own` was trained on; returns "" if there are none."""
    if chat_files(evaluated, "held_out")[1]:
        return ""  # the evaluation reports it
    if problems := chat_files(own, "train")[1]:
        return f"whether the run has trained on the held-out conversations is not known: {problems[0].message}"
    held_out = [each.content for each, is_chosen in read_conversations(evaluated, "held_out") if is_chosen]
    count = sum(among(held_out, (each.content for each, is_chosen in read_conversations(own, "train") if is_chosen)))
    if not count:
        return ""
    return f"the run has trained on {count} of the {len(held_out)} held-out conversations: this is no held-out loss"


def nothing_left(config: ChatConfig, split: Split) -> PlanError:
    """Returns the PlanError "data-short" for a split without a conversation."""
    if split == "held_out":
        hint = "name `held_out_files`, or raise `held_out`"
        return PlanError("held-out", "there is no held-out conversation to evaluate on", path=("evaluation",), hint=hint)
    return PlanError("data-short", "there is no conversation to train on", path=("data", "files"))
