"""What is wrong with the data that a plan names, found without torch and before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from sley_core.data.config import DataConfig, TextConfig, TokensConfig
from sley_core.data.documents import text_files, token_files
from sley_core.data.pin import pin_problem
from sley_core.data.sizes import num_samples
from sley_core.data.tokenizer import Tokenizer
from sley_core.errors import SleyError
from sley_core.records import Problem

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


def check_data(plan: Plan) -> Iterable[Problem]:
    """Problems of `core.text` and `core.tokens`; a factory's data is checked when it is made."""
    config = plan.data.config
    assert isinstance(config, DataConfig), config
    return check_table(config, evaluates=plan.evaluation is not None)


def check_table(config: DataConfig, *, evaluates: bool) -> Iterator[Problem]:
    """As `check_data`, for a table alone; `evaluates` is whether held-out data is needed.

    Files missing, empty or of odd size; a tokenizer missing, invalid or not installed; splits that are empty or shorter
    than one sample, as far as sizes tell; another number of samples than the plan is pinned to.
    """
    if not isinstance(config, TextConfig | TokensConfig):
        return
    problems = list(_file_problems(config))
    yield from problems
    if problems:
        return
    try:
        yield from _count_problems(config, evaluates)
    except SleyError as error:
        yield from (Problem(d.path, d.message, d.hint, d.code) for d in error.diagnostics)
    except OSError as error:
        yield Problem(("data",), f"the data cannot be read: {error}", None, "data-missing")


def _file_problems(config: TextConfig | TokensConfig) -> Iterator[Problem]:
    if isinstance(config, TokensConfig):
        for split in ("train", "held_out"):
            yield from token_files(config, split)[1]
        return
    yield from text_files(config)[1]
    if config.tokenizer is None:
        return
    if not config.tokenizer.is_file():
        hint = "a relative path starts at the plan's folder"
        yield Problem(("data", "tokenizer"), f"there is no file `{config.tokenizer}`", hint, "tokenizer-missing")
        return
    try:
        Tokenizer(config.tokenizer, config.end_of_document)
    except SleyError as error:
        yield from (Problem(d.path, d.message, d.hint, d.code) for d in error.diagnostics)


def _count_problems(config: TextConfig | TokensConfig, evaluates: bool) -> Iterator[Problem]:
    count = num_samples(config, "train")
    if count == 0:
        message = f"the data is shorter than one sample of {config.sequence} tokens and a label for the last"
        yield Problem(("data", "sequence"), message, "give more data or a smaller `sequence`", "data-short")
    elif count is not None and (problem := pin_problem(config, count)):
        yield problem
    if evaluates:
        yield from _held_out_problems(config)


def _held_out_problems(config: TextConfig | TokensConfig) -> Iterator[Problem]:
    if isinstance(config, TokensConfig) and not config.held_out_files:
        yield Problem(
            ("evaluation",), "there is no held-out data to evaluate on", "name `held_out_files` in `[data]`", "held-out"
        )
    elif isinstance(config, TextConfig) and not config.held_out:
        hint = "give `held_out` in `[data]` a share above 0"
        yield Problem(("evaluation",), "there is no held-out data to evaluate on", hint, "held-out")
    elif num_samples(config, "held_out") == 0:
        message = f"the held-out data is shorter than one sample of {config.sequence} tokens and a label for the last"
        hint = "one document alone is not split: name more, or give a `separator`"
        yield Problem(("evaluation",), message, hint, "held-out")
