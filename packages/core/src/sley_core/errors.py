"""The errors that a user can cause or must act on, and functions that write their messages and hints.

A `SleyError` carries one or more `Diagnostic`s, and the exit code of the command. A diagnostic has a code, a message, and
optionally a place and a hint. A bug of Sley itself is an `AssertionError`, never a `SleyError`.
"""

import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

KeyPath = tuple[str | int, ...]
"""The path to a value in a plan: `("gradient_handlers", 0, "bucket_mb")`."""

EXIT_OK = 0  # the exit codes of `train-cli`
EXIT_RUN_FAILED = 1  # for a RunError
EXIT_USAGE = 2  # for a UsageError
EXIT_PLAN_INVALID = 3  # for a PlanError
EXIT_PLUGIN = 4  # for a PluginError
EXIT_HUNG_UP = 129  # 128 + SIGHUP, as shells report it
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_TERMINATED = 143  # 128 + SIGTERM


def format_path(path: KeyPath) -> str:
    """Returns `path` in the form that `--set` uses, such as `gradient_handlers.0.bucket_mb`."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True, order=True)
class Place:
    """The place of `length` characters in a file. `line` and `column` start at 1; 0 means that only the file is known."""

    file: str
    line: int = 0
    column: int = 0
    length: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Diagnostic:
    """A problem to report. message: a sentence without a period. path: the key of the plan that is at fault, or ().
    source_line: the text of the line at `place`. hint: what the user can do.
    """

    code: str
    message: str
    path: KeyPath = ()
    place: Place | None = None
    source_line: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        prefix = f"{self.place}: " if self.place else ""
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"{prefix}error[{self.code}]: {self.message}{hint}"


class SleyError(Exception):
    """An error of the user or the environment, which is shown as diagnostics without a traceback.

    `SleyError("run-folder", "…", hint="…")` has one diagnostic; `SleyError.from_diagnostics([...])` has several.
    """

    exit_code = EXIT_RUN_FAILED

    def __init__(
        self, code: str, message: str, *, path: KeyPath = (), place: Place | None = None, hint: str | None = None
    ) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = (Diagnostic(code, message, path=path, place=place, hint=hint),)
        super().__init__(str(self.diagnostics[0]))

    @classmethod
    def from_diagnostics(cls, diagnostics: Iterable[Diagnostic]) -> "SleyError":
        """Returns an error with all of `diagnostics`, in this order; there must be at least one."""
        diagnostics = tuple(diagnostics)
        assert diagnostics, "an error without a diagnostic"
        error = cls(diagnostics[0].code, diagnostics[0].message)
        error.diagnostics = diagnostics
        error.args = ("\n".join(map(str, diagnostics)),)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        """Lets an error with all its diagnostics be pickled, since one process may raise it and another report it."""
        return type(self).from_diagnostics, (self.diagnostics,)


class RunError(SleyError):
    """The run failed, for example because a rank died, a wait timed out or a batch has an invalid token."""


class StateError(RunError):
    """The present state of the run does not allow the call, for example while its memory is offloaded."""

    @staticmethod
    def offloaded_error(part: str, caller: str) -> "StateError":
        """Returns StateError "memory-away". part: the offloaded part. caller: the operation, such as "a step"."""
        message = f"{caller} needs the run's {part.replace('_', ' ')}, but they are offloaded"
        hint = f'call `run.memory.onload("{part}")` first, or `run.memory.onload()` for everything'
        return StateError("memory-away", message, hint=hint)


def run_closed_error(name: str) -> RunError:
    """Returns RunError "run-closed" for a use of the object `name` after `Run.close`."""
    return RunError("run-closed", f"the {name} is used after it was closed", hint="use it inside `with assemble(...)`")


class UsageError(SleyError):
    """The command line, or a call in a program, is wrong."""

    exit_code = EXIT_USAGE


class PlanError(SleyError):
    """The plan is invalid, or a file that it names is missing or invalid."""

    exit_code = EXIT_PLAN_INVALID


class PluginError(SleyError):
    """A plugin that the plan needs is missing, broken, ambiguous or incompatible."""

    exit_code = EXIT_PLUGIN


_FOREIGN = "sley_is_foreign"  # the attribute by which `note_origin` marks an error


def note_origin(error: BaseException, origin: str, component: object = None) -> None:
    """Adds the note "in `origin`" to `error`, and marks for `is_foreign` whether the class of `component`, which raised it, is
    outside Sley; true for None. Does nothing for a SleyError, or if an earlier call has marked the error.
    """
    if isinstance(error, SleyError) or hasattr(error, _FOREIGN):
        return
    with suppress(AttributeError):  # an exception without a `__dict__`
        setattr(error, _FOREIGN, not type(component).__module__.startswith("sley_"))
    error.add_note(f"in {origin}")


def is_foreign(error: BaseException) -> bool:
    """Returns whether `note_origin` marked `error` as raised by code outside Sley; False for an AssertionError."""
    return bool(getattr(error, _FOREIGN, False)) and not isinstance(error, AssertionError)


def format_cause(error: BaseException) -> str:
    """Returns one line of text: the message of a `SleyError`, the system's message and the file name of an OSError, or else the
    type and first line of the error, with the innermost line of user code in its traceback.
    """
    if isinstance(error, SleyError):
        return error.diagnostics[0].message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    core_prefixes = (str(Path(__file__).parent), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(core_prefixes) and not is_installed(frame.filename):
            return f"{text} ({frame.filename}:{frame.lineno})"
    return text


_STDLIB = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]  # folders of the standard library


def is_installed(file: str) -> bool:
    """Returns whether `file` belongs to Python or to an installed package that is not editable."""
    path = Path(file)
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(
        path.is_relative_to(folder) for folder in _STDLIB
    )


def install_hint(package: str, extra: str = "") -> str:
    """Returns a hint to install `sley-PACKAGE` from a clone of the repository, since it is on no package index."""
    folder = f'"packages/{package}[{extra}]"' if extra else f"packages/{package}"
    name = f"{package}[{extra}]" if extra else package
    return f"install sley-{name}; in a clone of Sley's repository, run `pip install -e {folder}`"


SYNONYMS = {
    "gpu": "cuda",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "learning_rate": "lr",
    "batch_size": "global_size",
    "max_steps": "steps",
}
"""Sley's name for each name of another framework, for pairs whose spelling is too different for `suggestion` to match."""


FOREIGN_KEY_HINTS = {
    **dict.fromkeys(
        ("resume", "resume_from", "checkpoint", "checkpointing", "save_every"),
        "use `[checkpoint]` to save a run, and `train-cli run PLAN --resume auto` to continue it",
    ),
    **dict.fromkeys(
        ("epochs", "num_epochs", "max_epochs", "num_train_epochs"),
        "set `run.steps`; the run prints the corresponding number of epochs",
    ),
    "extends": "a plan is one file; change its values with `--set`",
}
"""Hints for keys of other frameworks that a plan does not have, by the name of the key."""


def suggestion(wrong: str, choices: Iterable[str], otherwise: str | None = None) -> str | None:
    """Returns a hint for the unknown name `wrong`: how Sley replaces a key of another framework, "did you mean ...?" for the
    most similar of `choices`, or else `otherwise`.
    """
    choices = list(choices)
    if (explanation := FOREIGN_KEY_HINTS.get(wrong.lower().replace("-", "_"))) and wrong not in choices:
        return explanation
    synonym = SYNONYMS.get(wrong.lower())
    matches = [synonym] if synonym in choices else get_close_matches(wrong, choices, n=1)
    return f"did you mean `{matches[0]}`?" if matches else otherwise


def make_printable(text: str) -> str:
    """Returns `text` with each unprintable character replaced by `?`; its length does not change."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def shorten_names(names: Sequence[str], max_names: int = 4) -> str:
    """Returns a text with the first `max_names` names and the number of the remaining names."""
    suffix = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return f"{', '.join(names[:max_names])}{suffix}"
