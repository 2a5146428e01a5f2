"""Commands that other packages bring, by entry points of the group `sley.commands`:

    [project.entry-points."sley.commands"]
    sweep = "my_package.sweep:sweep"          # a function with Typer's annotations, or a typer.Typer

makes `train-cli sweep`. Its package is imported when the command is called (or its own `--help`), never to list it.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand

from sley_core.errors import PluginError

GROUP = "sley.commands"


@cache
def foreign_commands() -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points of each command's name; more than one if several packages claim it."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


class ForeignCommand(TyperCommand):
    """Stands in for a command until it is called."""

    def __init__(self, name: str) -> None:
        self._points = foreign_commands()[name]
        dists = ", ".join(_label(point) for point in self._points)
        super().__init__(name, help=f"A command of {dists}.", rich_markup_mode=None)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent, **extra)

    def _load(self) -> Any:
        point, *others = self._points
        if others:
            dists = " and ".join(_label(each) for each in self._points)
            raise PluginError("command-ambiguous", f"the command `{self.name}` is brought by {dists}")
        try:
            loaded = point.load()
        except Exception as error:
            message = f"the command `{self.name}` of {_label(point)} cannot be imported: {error}"
            raise PluginError("command-import", message, hint="reinstall it, or report this to its authors") from error
        if isinstance(loaded, typer.Typer):
            return typer.main.get_command(loaded)
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(self.name)(loaded)
        return typer.main.get_command(app)


def _label(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value
