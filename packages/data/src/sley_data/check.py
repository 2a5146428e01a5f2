"""Checks the data of a plan before any process starts; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

from sley_core.errors import SleyError
from sley_core.records import Problem
from sley_data.documents import count_samples, find_copied_tokens, load_tokenizer, num_ids, read_file
from sley_data.files import text_files, token_files
from sley_data.plugin import TextConfig, TokensConfig

P = ParamSpec("P")


def report_errors(check: Callable[P, Iterator[Problem]]) -> Callable[P, Iterator[Problem]]:
    """Wraps a function that yields problems: an error ends it, and becomes a problem."""

    @wraps(check)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Iterator[Problem]:
        try:
            yield from check(*args, **kwargs)
        except SleyError as error:
            yield from (Problem(d.path, d.message, d.hint, d.code) for d in error.diagnostics)
        except OSError as error:
            yield Problem(("data",), f"the data cannot be read: {error}", None, "data-missing")

    return wrapper


@report_errors
def check(config: TextConfig | TokensConfig, *, evaluates: bool, vocab_size: int | None = None) -> Iterator[Problem]:
    """Yields the problems of a `data.text` or `data.tokens` table, as `DatasetRecord.check`."""
    if isinstance(config, TokensConfig):
        train, held_out = token_files(config, "train"), token_files(config, "held_out")
    else:
        train = text_files(config, "train")
        held_out = text_files(config, "held_out") if config.held_out_files else train
    problems = dict.fromkeys((*train[1], *held_out[1]))
    yield from problems
    yield from check_vocabulary(vocab_size, num_ids(config, load_tokenizer(config)))
    if problems:
        return
    if isinstance(config, TokensConfig):
        problems = dict.fromkeys(find_copied_tokens(train[0], held_out[0]))
    elif config.field is not None:  # later rows are read only in the run
        for file in dict.fromkeys((*train[0], *held_out[0])):
            next(read_file(config, file), None)
    yield from problems
    if problems:
        return
    yield from _train_problems(config, count_samples(config, "train", train[0]))
    if evaluates and count_samples(config, "held_out", held_out[0]) == 0:
        yield _held_out_problem(config)


def check_vocabulary(vocab_size: int | None, count: int) -> Iterator[Problem]:
    """Yields a problem if the model has fewer token ids than the data."""
    if vocab_size is not None and vocab_size < count:
        message = f"vocab_size = {vocab_size} is less than the {count} token ids of the data"
        yield Problem(("model", "vocab_size"), message, "increase or remove it", "model-vocabulary")


def _train_problems(config: TextConfig | TokensConfig, count: int | None) -> Iterator[Problem]:
    """Yields a problem if the training split has no sample, or a number of samples that differs from the resolved plan."""
    if count == 0 and isinstance(config, TextConfig) and (config.held_out or config.held_out_files):
        message = f"without the held-out documents, `files` is shorter than {_sample_text(config)}"
        hint = 'set `separator = "\\n\\n"` to make each paragraph a document, name more `files`, or use a smaller `sequence`'
        yield Problem(("data", "files"), message, hint, "data-short")
    elif count == 0:
        hint = "use more data or a smaller `sequence`"
        yield Problem(("data", "sequence"), f"the data is shorter than {_sample_text(config)}", hint, "data-short")
    elif count is not None and (problem := config.check_num_samples(count)):
        yield problem


def _held_out_problem(config: TextConfig | TokensConfig) -> Problem:
    """Returns the problem of a held-out split without a sample."""
    hint = "add files to `held_out_files` in `[data]`"
    if isinstance(config, TextConfig) and not config.held_out_files:
        hint = 'set `separator = "\\n\\n"` to make each paragraph a document, increase `held_out`, or add `held_out_files`'
    if config.held_out_files or (isinstance(config, TextConfig) and config.held_out):
        message = f"the held-out data is shorter than {_sample_text(config)}"
    else:
        message = "there is no held-out data to evaluate on"
    return Problem(("evaluation",), message, hint, "held-out")


def _sample_text(config: TextConfig | TokensConfig) -> str:
    return f"one sample of {config.sequence} tokens and a label for the last token"
