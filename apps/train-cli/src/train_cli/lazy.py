"""Imports a command when it is called or asked for its own help, and never to list commands.

Beside ours there are those of other packages, entry points of the group `sley.commands`:

    [project.entry-points."sley.commands"]
    sweep = "my_package.sweep:sweep"          # a function with Typer's annotations, or a typer.Typer

makes `train-cli sweep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperCommand

from sley_core.discovery import to_install
from sley_core.errors import PluginError

GROUP = "sley.commands"


class LazyCommand(TyperCommand):
    """Stands for a command until it is called; `load` returns its function or Typer app.

    options: parameters that every command has beside its own.
    """

    def __init__(self, name: str, summary: str, load: Callable[[], Any], options: Sequence[Any]) -> None:
        super().__init__(name, help=summary, short_help=summary, rich_markup_mode=None)
        self._load = load
        self._options = options

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Loads the command and parses its arguments."""
        loaded = self._load()
        if not isinstance(loaded, typer.Typer):
            app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            app.command(self.name)(loaded)
            loaded = app
        command = typer.main.get_command(loaded)
        command.params.extend(self._options)
        try:
            return command.make_context(info_name, args, parent, **extra)
        except Exception as error:
            _advise(error, command)
            raise


def _advise(error: Any, command: Any) -> None:
    """Adds advice to the error of an unknown option of `command`, in place of options with similar names."""
    # Click's NoSuchOption, of which some releases of Typer have a copy of their own.
    if not hasattr(error, "possibilities") or not hasattr(error, "option_name"):
        return
    from train_cli.options import remedy

    advice = remedy(error.option_name, [name for each in command.params for name in each.opts])
    error.possibilities = None
    error.message += f" ({advice})" if advice else ""


def of_sley(name: str, package: str) -> Callable[[], Any]:
    """Returns a loader of the command `name` of Sley's distribution `sley-<package>`, which the user may not have installed."""

    def load() -> Any:
        if name in foreign():
            return load_foreign(name)
        raise not_installed(package, f"`train-cli {name}`")

    return load


def not_installed(package: str, what: str) -> PluginError:
    """Returns PluginError "command-missing": `what` is part of `sley-<package>`, which is not installed."""
    message = f"{what} is part of sley-{package}, which is not installed"
    return PluginError("command-missing", message, hint=to_install(package))


def module_of(package: str, module: str, what: str) -> Any:
    """Imports and returns `module` of `sley-<package>`; raises PluginError "command-missing" if that is not installed."""
    if find_spec(module.partition(".")[0]) is None:
        raise not_installed(package, what)
    return import_module(module)


def own(name: str) -> Callable[[], Any]:
    """Returns a loader of the function `name` of our module `commands.<name>`."""
    return lambda: getattr(import_module(f"train_cli.commands.{name}"), name)


@cache
def foreign() -> dict[str, tuple[EntryPoint, ...]]:
    """Returns the entry points of each command of other packages; several if packages claim the same name."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def foreign_summary(name: str) -> str:
    """Returns the summary for `--help` of the command `name` of another package, without importing it."""
    return f"A command of {_labels(foreign()[name])}."


def load_foreign(name: str) -> Any:
    """Imports the command `name` of another package.

    Raises PluginError "command-ambiguous" and "command-import".
    """
    point, *others = foreign()[name]
    if others:
        message = f"the command `{name}` is brought by {_labels(foreign()[name])}"
        raise PluginError("command-ambiguous", message, hint="uninstall one of them")
    try:
        return point.load()
    except Exception as error:
        message = f"the command `{name}` of {_labels([point])} cannot be imported: {type(error).__name__}: {error}"
        raise PluginError("command-import", message, hint="reinstall it, or report this to its authors") from error


def _labels(points: Sequence[EntryPoint]) -> str:
    return " and ".join(f"{each.dist.name} {each.dist.version}" if each.dist else each.value for each in points)
