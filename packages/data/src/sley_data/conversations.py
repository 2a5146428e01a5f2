"""Reads conversations from rows, as messages for chat templates; torch-free. A row has one of these keys or pairs of keys:

    messages                  [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]
    conversations             the same, or ShareGPT's [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]
    prompt and completion     two texts, or two lists of messages; the prompt has labels only with `train_on = "all"`

The template also receives the other keys of a message, such as `tool_calls` and `name`, and the `tools` of a row.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from sley_data.files import DataFile
from sley_data.formats import build_row_error, read_rows

Message = dict[str, Any]
"""A message: a dict with the keys `role` and `content`, and further keys for the template."""

_COLUMNS = ("messages", "conversations", "prompt", "completion", "system", "tools")
"""The columns of a table that may contain a conversation."""

SHAREGPT_ROLES = {
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
"""The role of each speaker in ShareGPT's `from`."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation.

    name: the file name and the row number. tools: the tools that the assistant may call, or None. first_trained: the index of
    the first message that may have labels.
    """

    name: str
    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    first_trained: int = 0

    @property
    def trained_turns(self) -> list[int]:
        """The indices of the assistant's messages that may have labels. Leaves out messages with `weight` 0."""
        numbers = (number for number in self.assistant_turns if number >= self.first_trained)
        return [number for number in numbers if self.messages[number].get("weight") != 0]

    @property
    def assistant_turns(self) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    @cached_property
    def _content(self) -> bytes:
        return json.dumps([self.messages, self.tools], sort_keys=True, default=str).encode()

    @property
    def num_bytes(self) -> int:
        return len(self._content)

    @property
    def key(self) -> bytes:
        """The digest that identifies the messages and tools."""
        return content_key(self._content)


def content_key(content: bytes) -> bytes:
    """Returns the digest that identifies the content of a document."""
    return sha256(content).digest()


def read_conversations(file: DataFile, field: str | None) -> Iterator[Conversation]:
    """Yields the conversations of a file. field: the key of the messages, or None for the keys that the module describes.

    Raises PlanError "data-json" for a row that is not a conversation, and the errors of `read_rows`.
    """
    columns = _COLUMNS if field is None else (field, "system", "tools")
    for number, row in read_rows(file, columns if file.format.is_table else None):
        try:
            yield _parse_row(row, field, f"{file.name}#{number}")
        except (ValueError, RecursionError) as error:
            raise build_row_error(file, number, str(error)) from None


def _parse_row(row: dict[str, Any], field: str | None, name: str) -> Conversation:
    tools = row.get("tools")
    if isinstance(tools, str):  # columns of tables have no type for arbitrary schemas
        tools = json.loads(tools) if tools.strip() else None
    tools = tools or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError("has `tools` that are not a list")
    key = field if field is not None else next((key for key in ("messages", "conversations") if key in row), None)
    if key is not None and key in row:
        messages = _parse_messages(row[key], key)
        if isinstance(row.get("system"), str) and row["system"] and (not messages or messages[0]["role"] != "system"):
            messages.insert(0, {"role": "system", "content": row["system"]})
        return Conversation(name, messages, tools)
    if field is None and "prompt" in row and "completion" in row:
        prompt = _parse_messages(row["prompt"], "prompt", role="user")
        return Conversation(
            name, [*prompt, *_parse_messages(row["completion"], "completion", role="assistant")], tools, len(prompt)
        )
    missing = f"`{field}`" if field is not None else "`messages`, `conversations`, or `prompt` and `completion`"
    raise ValueError(f"has no {missing}; its keys are {', '.join(f'`{key}`' for key in row) or 'none'}")


def _parse_messages(value: Any, key: str, role: str | None = None) -> list[Message]:
    """Returns the messages in `value`. role: the role of a plain text; with None, a plain text raises ValueError.

    Raises ValueError for any other value that is not a list of messages.
    """
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, str):  # some tables contain messages as JSON
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list):
        raise ValueError(f"has `{key}` that is not a list of messages")
    return [_parse_message(item, number) for number, item in enumerate(value, start=1)]


def _parse_message(value: Any, number: int) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"has a message {number} that is not an object with `role` and `content`")
    message = {key: inner for key, inner in value.items() if inner is not None}
    if "role" not in message and isinstance(message.get("from"), str):
        name = message.pop("from")
        if name not in SHAREGPT_ROLES:
            raise ValueError(f"has a message {number} with `from` {name!r}; use one of {', '.join(map(repr, SHAREGPT_ROLES))}")
        message["role"] = SHAREGPT_ROLES[name]
        message["content"] = message.pop("value", None)
    if not isinstance(message.get("role"), str):
        raise ValueError(f"has no `role` in message {number}")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_part_text(part, number) for part in content)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"has no text in the field `content` of message {number}")
    for call in message.get("tool_calls") or ():
        _parse_arguments(call)
    json.dumps(message, ensure_ascii=False, default=str).encode()  # raises ValueError for half of a surrogate pair
    return message


def _parse_arguments(call: Any) -> None:
    """Replaces the arguments of a tool call, if they are JSON text as in OpenAI's format, by the object that templates need."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return
        if isinstance(arguments, dict):
            function["arguments"] = arguments


def _part_text(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    part_type = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"has a part of type {part_type!r} in message {number}; only text is supported")
