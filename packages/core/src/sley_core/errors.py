"""Errors for every fault that a user can cause or must act on: each has a code, a place, a message and a hint.

A `SleyError` carries one or more `Diagnostic`s and the exit code of the command that raised it. A fault of our own is an
`AssertionError` with the values that broke the rule, never a `SleyError`.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KeyPath = tuple[str | int, ...]
"""The path to a value in a plan: `("gradient_handlers", 0, "bucket_mb")`."""

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_USAGE = 2
EXIT_PLAN_INVALID = 3
EXIT_PLUGIN = 4
EXIT_HUNG_UP = 129
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def format_path(path: KeyPath) -> str:
    """Returns the path as `--set` writes it: `gradient_handlers.0.bucket_mb`."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True, order=True)
class Place:
    """A position in a file; `line` and `column` count characters from 1, 0 where only the file is known."""

    file: str
    line: int = 0
    column: int = 0
    length: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Diagnostic:
    """Holds one problem: a message without a final period, its place, and a hint."""

    code: str
    message: str
    path: KeyPath = ()
    place: Place | None = None
    source_line: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"{where}error[{self.code}]: {self.message}{hint}"


class SleyError(Exception):
    """The user's fault or the world's: rendered as diagnostics, without a traceback.

    `SleyError("run-folder", "…", hint="…")` makes one diagnostic; `SleyError.many([...])` carries several.
    """

    exit_code = EXIT_RUN_FAILED

    def __init__(
        self, code: str, message: str, *, path: KeyPath = (), place: Place | None = None, hint: str | None = None
    ) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = (Diagnostic(code, message, path=path, place=place, hint=hint),)
        super().__init__(str(self.diagnostics[0]))

    @classmethod
    def many(cls, diagnostics: Iterable[Diagnostic]) -> SleyError:
        """Returns one error that carries all `diagnostics` in their order; there must be at least one."""
        diagnostics = tuple(diagnostics)
        assert diagnostics, "an error without a diagnostic"
        error = cls(diagnostics[0].code, diagnostics[0].message)
        error.diagnostics = diagnostics
        error.args = ("\n".join(map(str, diagnostics)),)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the error with all its diagnostics: it may be raised in one process and reported in another."""
        return type(self).many, (self.diagnostics,)


class RunError(SleyError):
    """The run itself failed: a rank died, a wait ran out of time, a batch held an impossible token."""


class StateError(RunError):
    """A call needs offloaded memory of the run, or comes within a step. The hint names the call that helps."""


def run_closed_error(name: str) -> RunError:
    """Returns the error `run-closed`, for a program that uses the object `name` after `Run.close`."""
    return RunError("run-closed", f"the {name} is used after its run was closed", hint="use it inside `with assemble(...)`")


class UsageError(SleyError):
    """The command line is wrong."""

    exit_code = EXIT_USAGE


class PlanError(SleyError):
    """The plan is wrong: its syntax, a table, a size, a layout, or a file that it names."""

    exit_code = EXIT_PLAN_INVALID


class PluginError(SleyError):
    """A plugin that the plan needs is missing, broken, ambiguous or incompatible."""

    exit_code = EXIT_PLUGIN


_FOREIGN = "sley_is_foreign"


def note_origin(error: BaseException, what: str, maker: object = None) -> None:
    """Adds a note to an error: it arose in `what`, which the plan names. The innermost call decides. maker: an object whose
    class tells whose fault it is: the user's, unless the class is one of Sley's.
    """
    if isinstance(error, SleyError) or hasattr(error, _FOREIGN):
        return
    with suppress(AttributeError):  # an exception without a `__dict__`
        setattr(error, _FOREIGN, not type(maker).__module__.startswith("sley_"))
    error.add_note(f"in {what}")


def is_foreign(error: BaseException) -> bool:
    """Returns whether the error arose in code that a plan names and that is not Sley's."""
    return bool(getattr(error, _FOREIGN, False)) and not isinstance(error, AssertionError)


def cause(error: BaseException) -> str:
    """Returns an error in one line: the message of a `SleyError`, what the system says of a file, or the type, the first line
    and the innermost place in a user's code.
    """
    if isinstance(error, SleyError):
        return error.diagnostics[0].message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    inside = (str(Path(__file__).parent), "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(inside) and not is_installed(frame.filename)]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text


LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""Names of folders into which packages are installed, in whatever environment."""

_STDLIB = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")]


def is_installed(file: str) -> bool:
    """Returns whether `file` belongs to Python or an installed package, not to an editable one or a project."""
    path = Path(file)
    return not LIBRARIES.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in _STDLIB)
