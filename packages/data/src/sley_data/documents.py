"""Reads the documents of a split, which are texts or conversations. Does not import torch.

Only the content of a document decides whether it is held out, so all copies of a document are in the same split. The split does
not depend on the ranks, the order of the files, the seed, or the path of the corpus.

The row of a conversation has one of these keys or pairs of keys. The chat template also receives the other keys of a message,
such as `tool_calls` and `name`, and the `tools` of the row.

    messages                  [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]
    conversations             the same, or ShareGPT's [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]
    prompt and completion     two texts, or two lists of messages; the prompt has labels only with `train_on = "all"`
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain
from mmap import ACCESS_READ, mmap
from typing import Any, NamedTuple, TypeAlias

from sley_core.api.data import Split
from sley_core.records import Problem
from sley_data.files import DataFile, find_document_files, find_split_files
from sley_data.formats import build_row_error, open_decompressed, read_rows
from sley_data.plugin import ChatConfig, DocumentsConfig, TextConfig

Message = dict[str, Any]
"""A message: a dict with the keys `role` and `content`, and further keys for the template."""

_CONVERSATION_COLUMNS = ("messages", "conversations", "prompt", "completion", "system", "tools")
"""The columns of a table that contain a conversation. Other columns are not read."""

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
}
"""The role of a message, keyed by the value of `from` in ShareGPT's format."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as a document. name: the file name and the row number. messages: the messages in order. tools: the tools
    that the assistant may call, or None. first_trained_index: the index of the first message that may have labels.
    """

    name: str
    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    first_trained_index: int = 0

    @property
    def trained_turns(self) -> list[int]:
        """The indices of the assistant's messages that may have labels. Leaves out messages with `weight` 0."""
        indices = self.assistant_turns
        return [i for i in indices if i >= self.first_trained_index and self.messages[i].get("weight") != 0]

    @property
    def assistant_turns(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    @cached_property
    def content(self) -> bytes:
        """The messages and tools as JSON."""
        return json.dumps([self.messages, self.tools], sort_keys=True, default=str).encode()


class TextDocument(NamedTuple):
    """A text. name: the file name, with the number of the row or piece. content: the bytes of the text."""

    name: str
    content: bytes


Document: TypeAlias = TextDocument | Conversation
"""A document of `data.text` or `data.chat`. The SHA-256 of its `content` identifies it."""

_PIECE_BYTES = 1 << 10  # the size in bytes of each piece of a held-out token file that is searched for in the training files

_MAX_SEARCH_BYTES = 1 << 30
"""The maximum number of bytes that are searched for copies of held-out tokens, which takes about a second."""

_READ_BYTES = 1 << 20  # the number of bytes of a file that are read and split at a time


def is_held_out(digest: bytes, share: float) -> bool:
    """Returns whether a document is held out: whether its digest, read as a number in [0, 1), is less than `share`."""
    return share > 0 and int.from_bytes(digest[:8], "big") < share * 2**64


def find_copied_tokens(training_files: Sequence[DataFile], held_out_files: Sequence[DataFile]) -> list[Problem]:
    """Returns a problem for each held-out token file whose tokens are also in a training file. Searches the training files for
    three pieces of each held-out file. Searches only the start and the end of a large training file.
    """
    max_bytes = _MAX_SEARCH_BYTES // max(1, len(training_files) * len(held_out_files))
    problems = []
    for held_out in held_out_files:
        pieces = _read_pieces(held_out)
        copy = next((file for file in training_files if pieces and _contains_all(file, pieces, max_bytes)), None)
        if copy is not None:
            message = f"the held-out tokens of `{held_out.path}` are also in `{copy.path}`, so the run would train on them"
            hint = "remove these tokens from `files`"
            problems.append(Problem(("data", "held_out_files"), message, hint, "held-out-trained"))
    return problems


def _contains_all(file: DataFile, pieces: Sequence[bytes], max_bytes: int) -> bool:
    """Returns whether a file contains all `pieces`. Searches at most `max_bytes` of it: the start and the end of the file."""
    with file.path.open("rb") as raw_file, mmap(raw_file.fileno(), 0, access=ACCESS_READ) as content:
        size = len(content)
        ranges = [(0, size)] if size <= max_bytes else [(0, max_bytes // 2), (size - max_bytes // 2, size)]
        return all(any(content.find(piece, start, stop) >= 0 for start, stop in ranges) for piece in pieces)


def _read_pieces(file: DataFile) -> list[bytes]:
    """Returns pieces from the start, middle and end of a token file. Leaves out pieces with at most 4 distinct bytes."""
    pieces = []
    with file.path.open("rb") as content:
        for start in (0, (file.num_bytes - _PIECE_BYTES) // 2, file.num_bytes - _PIECE_BYTES):
            content.seek(max(0, start))
            pieces.append(content.read(_PIECE_BYTES))
    return [piece for piece in dict.fromkeys(pieces) if len(set(piece)) > 4]


_MAX_COMPARE_BYTES = 1 << 30  # the maximum number of bytes that are read only to compare documents, which takes about a second


def read_documents(
    files: Sequence[DataFile], config: DocumentsConfig, split: Split, notes: list[str] | None = None
) -> Iterator[Any]:
    """Yields each document of a split, in the order of `files`, the files of the split. Excludes documents of other splits. If
    only `held_out_files` excludes documents, a sentence with their number finally replaces the content of `notes`. Yields
    nothing for a held-out split if the table holds nothing out. Raises PlanError with all problems of the held-out files, or
    PlanError "data-json" for the first row that is not a document.
    """
    if split == "held_out" and not (config.held_out or config.held_out_files):
        return
    is_selected = build_split_filter(config, split)
    count = num_excluded = 0
    for document in chain.from_iterable(read_file(config, file) for file in files):
        count += 1
        if is_selected(sha256(document.content).digest()):
            yield document
        else:
            num_excluded += 1
    if num_excluded and not config.max_held_out and notes is not None:
        excluded = f"{num_excluded} of {count} documents in `files` are also in `held_out_files`"
        notes[:] = [f"{excluded}: training excludes them"]


def _read_split_digests(config: DocumentsConfig, split: Split) -> list[bytes]:
    """Returns the digest of each document of a split. Raises PlanError with all problems of its files."""
    files, _ = find_split_files(config, split)
    return [sha256(document.content).digest() for document in read_documents(files, config, split)]


def describe_overlap(training: DocumentsConfig, evaluation: DocumentsConfig) -> str:
    """Returns a sentence with the number of held-out documents of `evaluation` on which a run with `training` trains, or "" if
    there are none. Compares the contents of all documents. If a comparison is not possible, for example because the training
    files have more than 1 GiB, the sentence says so.
    """
    noun = "documents" if isinstance(training, TextConfig) else "conversations"
    if isinstance(training, TextConfig) and any(
        getattr(training, key) != getattr(evaluation, key) for key in ("separator", "field")
    ):
        return "the run splits its files into other documents, so it is not known whether it was trained on the held-out text"
    if find_document_files(evaluation, "held_out")[1]:
        return ""  # the evaluation reports the problems
    files, problems = find_document_files(training, "train")
    reason = problems[0].message if problems else ""
    if not problems and sum(file.num_bytes for file in files) > _MAX_COMPARE_BYTES:
        reason = f"its data has more than {_MAX_COMPARE_BYTES >> 30} GiB, and is not read for this comparison"
    if reason:
        return f"it is not known whether the run was trained on the held-out {noun}: {reason}"
    held_out, trained = _read_split_digests(evaluation, "held_out"), set(_read_split_digests(training, "train"))
    count = sum(digest in trained for digest in held_out)
    if not count:
        return ""
    return f"the run was trained on {count} of the {len(held_out)} held-out {noun}, so this is not a held-out loss"


def build_split_filter(config: DocumentsConfig, split: Split) -> Callable[[bytes], bool]:
    """Returns a function that takes the digest of a document, and returns whether the document belongs to the split. The
    training split also excludes the held-out documents of other sources of a mixture.
    """
    if split == "held_out":
        return lambda digest: bool(config.held_out_files) or is_held_out(digest, config.held_out)
    share = config.max_held_out
    tables = (table for table in config.all_tables if table.held_out_files)
    held_out = set(chain.from_iterable(_read_split_digests(table, "held_out") for table in tables))
    return lambda digest: not is_held_out(digest, share) and digest not in held_out


def read_file(config: DocumentsConfig, file: DataFile) -> Iterator[Document]:
    """Yields each document in a file. Raises PlanError "data-json" for a bad row, and the errors of `open_decompressed`."""
    if isinstance(config, ChatConfig):
        yield from read_conversations(file, config.field)
    elif config.field is not None:
        yield from _read_texts(file, config.field)
    elif isinstance(config, TextConfig) and config.separator is not None:
        yield from _split_file(file, config.separator.encode())
    else:
        with open_decompressed(file.path) as content:
            yield TextDocument(file.name, content.read())


def _split_file(file: DataFile, separator: bytes) -> Iterator[TextDocument]:
    """Yields the non-empty documents of a file, named `FILE#0`, `FILE#1`, ... `\\n` in `separator` also matches `\\r\\n`."""
    pattern = re.compile(re.sub(rb"(?:\\\r)?\\\n", rb"\r?\n", re.escape(separator)))
    number, remainder = 0, b""
    with open_decompressed(file.path) as content:
        while block := content.read(max(_READ_BYTES, len(remainder))):
            *texts, remainder = pattern.split(remainder + block)
            for text in texts:
                if text:
                    yield TextDocument(f"{file.name}#{number}", text)
                number += 1
    if remainder:
        yield TextDocument(f"{file.name}#{number}", remainder)


def _read_texts(file: DataFile, field: str) -> Iterator[TextDocument]:
    """Yields the non-empty text in the key or column `field` of each row of a file. Raises PlanError "data-json"."""
    for number, row in read_rows(file, (field,) if file.format.is_table else None):
        text = row.get(field, "" if file.format.is_table else None)  # tables omit null values
        if not isinstance(text, str):
            if field in row:
                raise build_row_error(file, number, f"has no text in the field `{field}`")
            hint = f"set `field` to one of these keys: {', '.join(f'`{key}`' for key in row)}" if row else None
            raise build_row_error(file, number, f"has no `{field}`", hint)
        try:
            content = text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise build_row_error(file, number, f"cannot be read: {error}") from None
        if content:
            yield TextDocument(f"{file.name}#{number}", content)


def read_conversations(file: DataFile, field: str | None) -> Iterator[Conversation]:
    """Yields the conversations of a file. field: the key of the messages, or None for the default keys, such as `messages`.
    Raises PlanError "data-json" for a row that is not a conversation, and the errors of `read_rows`.
    """
    columns = _CONVERSATION_COLUMNS if field is None else (field, "system", "tools")
    for number, row in read_rows(file, columns if file.format.is_table else None):
        try:
            yield _parse_row(row, field, f"{file.name}#{number}")
        except (ValueError, RecursionError) as error:
            raise build_row_error(file, number, str(error)) from None


def _parse_row(row: dict[str, Any], field: str | None, name: str) -> Conversation:
    """Returns the conversation in a row. Raises ValueError, whose message is a predicate about the row, if the row has none."""
    tools = row.get("tools")
    if isinstance(tools, str):  # columns of tables have no type for arbitrary schemas
        tools = json.loads(tools.strip() or "null")
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
        completion = _parse_messages(row["completion"], "completion", role="assistant")
        return Conversation(name, [*prompt, *completion], tools, len(prompt))
    missing = f"`{field}`" if field is not None else "`messages`, `conversations`, or `prompt` and `completion`"
    raise ValueError(f"has no {missing}; its keys are {', '.join(f'`{key}`' for key in row) or 'none'}")


def _parse_messages(value: Any, key: str, role: str | None = None) -> list[Message]:
    """Returns the messages in `value`, the content of `key`. role: the role of the message if `value` is a plain text. If it is
    None, a text must contain the list of messages as JSON. Raises ValueError if `value` is not a list of messages.
    """
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, str):  # some tables contain messages as JSON
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list):
        raise ValueError(f"has `{key}` that is not a list of messages")
    return [_parse_message(item, number) for number, item in enumerate(value, start=1)]


def _parse_message(value: Any, number: int) -> Message:
    """Returns `value`, message `number` of a row (from 1), in OpenAI's format. Raises ValueError if it has no role or text."""
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
        message["content"] = "".join(_read_text_part(part, number) for part in content)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"has no text in the field `content` of message {number}")
    for call in message.get("tool_calls") or ():
        _parse_tool_arguments(call)
    json.dumps(message, ensure_ascii=False, default=str).encode()  # raises ValueError for half of a surrogate pair
    return message


def _parse_tool_arguments(call: Any) -> None:
    """If the arguments of a tool call are a JSON string (OpenAI), replaces them in place with the dict that templates need."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        with suppress(ValueError):
            if isinstance(arguments := json.loads(function["arguments"]), dict):
                function["arguments"] = arguments


def _read_text_part(part: Any, number: int) -> str:
    """Returns the text of a part of message `number`. Raises ValueError for other types of parts, such as images."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    part_type = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"has a part of type {part_type!r} in message {number}; only text is supported")
