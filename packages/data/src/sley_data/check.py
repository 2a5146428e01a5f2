"""Checks the data that a plan names, without torch and before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from sley_core.api.data import DataContext, Split
from sley_core.api.plan import DataConfig
from sley_core.errors import SleyError
from sley_core.records import Problem
from sley_data.chat import ChatRows
from sley_data.chat_template import ChatTemplate
from sley_data.config import NUM_BYTES, ChatConfig, TextConfig, TokensConfig
from sley_data.conversations import chat_files, conversations_in, nothing_left
from sley_data.documents import ALWAYS_READ, copied_tokens, count_samples, documents_inside, of_split
from sley_data.files import File, Found, text_files, token_files


def check(config: DataConfig, *, evaluates: bool, vocab_size: int | None = None) -> Iterator[Problem]:
    """Yields the problems of a table of `data.text` or `data.tokens`: `DatasetRecord.check`."""
    assert isinstance(config, TextConfig | TokensConfig), config
    yield from _of_table(config, evaluates=evaluates)
    try:
        count = _num_ids(config)
    except SleyError:
        return  # reported already
    if vocab_size is not None and vocab_size < count:
        yield _too_few_ids(vocab_size, count)


_MOST_CHECKED = 64
"""Conversations of large files that are rendered before a run."""


def check_chat(config: ChatConfig, *, evaluates: bool, vocab_size: int | None = None) -> Iterator[Problem]:
    """Yields the problems of a table of `data.chat`: `DatasetRecord.check`.

    Of large files only the first conversations are read, rendered and masked; of small ones all are.
    """
    splits: list[Split] = ["train", "held_out"] if evaluates else ["train"]
    files, problems = chat_files(config, "train")
    if config.held_out_files:
        more = chat_files(config, "held_out")
        files, problems = [*files, *more[0]], [*problems, *more[1]]
    yield from problems
    if problems:
        return
    try:
        template = ChatTemplate(config.tokenizer, config.template)
        if vocab_size is not None and vocab_size < template.vocab_size:
            yield _too_few_ids(vocab_size, template.vocab_size)
        if sum(file.num_bytes for file in files) > ALWAYS_READ:
            first = islice(conversations_in(files[0], config.field), _MOST_CHECKED)
            outcomes = list(template.encode(first, config))
            if not any(sample.trained for _, samples, _ in outcomes for sample in samples):
                reasons = ", ".join(dict.fromkeys(reason for _, _, reason in outcomes if reason))
                message = f"the first {len(outcomes)} conversations have nothing to train on{f': {reasons}' if reasons else ''}"
                yield Problem(("data", "train_on"), message, None, "chat-mask")
            if evaluates and not config.held_out and not config.held_out_files:
                yield from _problems_of(nothing_left(config, "held_out"))
            return
        for split in splits:
            count = len(ChatRows(config, DataContext(split=split), template))
            if split == "train" and (problem := config.changed(count)):
                yield problem
    except SleyError as error:
        yield from _problems_of(error)
    except OSError as error:
        yield _unreadable(error)


def _too_few_ids(vocab_size: int, count: int) -> Problem:
    message = f"vocab_size = {vocab_size} is less than the {count} token ids of the data"
    return Problem(("model", "vocab_size"), message, "leave it out, or raise it", "model-vocabulary")


def _unreadable(error: OSError) -> Problem:
    return Problem(("data",), f"the data cannot be read: {error}", None, "data-missing")


def _num_ids(config: TextConfig | TokensConfig) -> int:
    if isinstance(config, TokensConfig):
        return config.vocab_size
    if config.tokenizer is None:
        return NUM_BYTES
    from sley_data.tokenizer import Tokenizer  # bytes need none

    return Tokenizer(config.tokenizer, None).vocab_size


def _of_table(config: TextConfig | TokensConfig, *, evaluates: bool) -> Iterator[Problem]:
    """Yields the problems of the table alone: files missing, empty or of odd size; a tokenizer missing, invalid or not
    installed; splits that are empty or shorter than one sample, if sizes tell; another number of samples than the plan was
    resolved for.
    """
    train, held_out = _files(config)
    problems = list(dict.fromkeys((*train[1], *held_out[1], *_tokenizer_problems(config))))
    if not problems:
        problems = list(_first_lines(config, [*train[0], *held_out[0]]))
    if not problems and isinstance(config, TokensConfig):
        problems = copied_tokens(train[0], held_out[0])
    yield from problems
    if problems:
        return
    try:
        alone, count = _only_document(config, train[0]), count_samples(config, "train", train[0])
        if count == 0 and isinstance(config, TextConfig) and config.held_out_files and _is_enough(config, train[0]):
            message = f"without the documents that `held_out_files` has too, `files` is shorter than {_sample(config)}"
            yield Problem(("data", "files"), message, "name more `files`, or others in `held_out_files`", "data-short")
        else:
            yield from _train_problems(config, count, alone)
        if evaluates:
            yield from _held_out_problems(config, count_samples(config, "held_out", held_out[0]), alone)
    except SleyError as error:
        yield from _problems_of(error)
    except OSError as error:
        yield _unreadable(error)


def _files(config: TextConfig | TokensConfig) -> tuple[Found, Found]:
    """Returns the files and problems of the train split and of the held-out split."""
    if isinstance(config, TokensConfig):
        return token_files(config, "train"), token_files(config, "held_out")
    train = text_files(config, "train")
    return train, text_files(config, "held_out") if config.held_out_files else train


def _first_lines(config: TextConfig | TokensConfig, files: Iterable[File]) -> Iterator[Problem]:
    """Yields a problem if the first document inside a file cannot be read; the rest of the file is read by the run."""
    inside = documents_inside(config) if isinstance(config, TextConfig) and config.field is not None else None
    for file in dict.fromkeys(files) if inside else ():
        assert inside is not None
        try:
            next(iter(inside(file)), None)
        except SleyError as error:
            yield from _problems_of(error)
            return
        except OSError:
            return  # reported when its samples are counted


def _tokenizer_problems(config: TextConfig | TokensConfig) -> Iterator[Problem]:
    """Yields the problems of the tokenizer of a `data.text` table; loads it."""
    if isinstance(config, TokensConfig) or config.tokenizer is None:
        return
    from sley_data.tokenizer import Tokenizer  # bytes need none

    try:
        Tokenizer(config.tokenizer, config.end_of_document)
    except SleyError as error:
        yield from _problems_of(error)


def _problems_of(error: SleyError) -> Iterator[Problem]:
    return (Problem(d.path, d.message, d.hint, d.code) for d in error.diagnostics)


def _only_document(config: TextConfig | TokensConfig, files: Sequence[File]) -> File | None:
    """Returns the file that is the only document of a text with a share to hold out; None for any other data."""
    if not isinstance(config, TextConfig) or not config.held_out or documents_inside(config) is not None:
        return None
    return files[0] if len(files) == 1 else None


def _is_enough(config: TextConfig, files: Sequence[File]) -> bool:
    """Returns whether `files` would give a sample if `held_out_files` named nothing."""
    return count_samples(config.model_copy(update={"held_out_files": ()}), "train", files) != 0


def _train_problems(config: TextConfig | TokensConfig, count: int | None, alone: File | None) -> Iterator[Problem]:
    """Yields a problem for a train split shorter than one sample, or of another size than the plan was resolved for."""
    if alone is not None and isinstance(config, TextConfig) and not of_split([alone], config, "train"):
        message = f"`{alone.path}` is one document, and held out as such: nothing is left to train on"
        hint = '`separator = "\\n\\n"` makes each paragraph a document; or write `held_out = 0.0`'
        yield Problem(("data", "files"), message, hint, "data-short")
    elif count == 0:
        hint = "give more data or a smaller `sequence`"
        yield Problem(("data", "sequence"), f"the data is shorter than {_sample(config)}", hint, "data-short")
    elif count is not None and (problem := config.changed(count)):
        yield problem


def _held_out_problems(config: TextConfig | TokensConfig, count: int | None, alone: File | None) -> Iterator[Problem]:
    """Yields a problem if evaluation is wanted and the held-out split has no sample. alone: see `_only_document`."""
    if count != 0:
        return
    if alone is not None and isinstance(config, TextConfig) and not of_split([alone], config, "held_out"):
        message = f"`{alone.path}` is one document, and documents are held out whole: none is left to evaluate on"
        hint = '`separator = "\\n\\n"` makes each paragraph a document; or name another file in `held_out_files`'
        yield Problem(("evaluation",), message, hint, "held-out")
        return
    if config.held_out_files or (isinstance(config, TextConfig) and config.held_out):
        message = f"the held-out data is shorter than {_sample(config)}"
    else:
        message = "there is no held-out data to evaluate on"
    has_share = isinstance(config, TextConfig) and not config.held_out_files
    more = ", or raise `held_out`, which takes whole documents (see `separator`)"
    hint = "name (more) `held_out_files` in `[data]`" + (more if has_share else "")
    yield Problem(("evaluation",), message, hint, "held-out")


def _sample(config: TextConfig | TokensConfig) -> str:
    return f"one sample of {config.sequence} tokens, the last of which needs a label"
