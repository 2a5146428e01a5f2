"""The commands of `train-cli` and the options that all of them have."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from train_cli.console import Settings
from train_cli.lazy import LazyCommand, foreign, foreign_summary, load_foreign, of_sley, own
from train_cli.options import MessageFormat

SECTIONS = {
    "Prepare": {
        "new": "Write a plugin package to start from.",
        "plugins": "List installed plugins, records and their options.",
        "needs": "Print what to pip install for a plan.",
        "schema": "Print the JSON Schema of a plan.",
        "check": "Find every mistake of one or more plans.",
        "show": "Show the resolved plan, ranks and groups.",
    },
    "Look ahead": {
        "estimate": "Say how much memory each stage needs.",
        "search": "Find the fastest layouts that fit.",
        "calibrate": "Measure this machine, for estimates of seconds.",
    },
    "Train": {
        "run": "Train as the plan says.",
        "launch": "Print what starts a plan on several hosts.",
        "verify": "Compare a plan's layout with one process.",
    },
    "Look back": {
        "doctor": "Say what went wrong in a run, from the reports of its ranks.",
        "report": "Write a page about runs, with curves and tables.",
        "eval": "Print the held-out loss of a run's weights.",
        "sample": "Generate text from a run's weights.",
        "export": "Write a run's weights for other programs.",
        "env": "Print versions and devices, for a report.",
    },
}
"""Sley's commands in the order in which one comes to use them, as in `--help`."""

PACKAGES = {"estimate": "estimate", "search": "estimate", "calibrate": "estimate", "doctor": "doctor", "report": "doctor"}
"""Those that a package `sley-<...>` of its own brings; the others have their function in our module of their name."""

COMMANDS = {name: summary for section in SECTIONS.values() for name, summary in section.items()}

# \b keeps the lines of a paragraph as they are.
HELP = """
\b
Examples:
  train-cli run plan.toml
  train-cli check plan.toml --set batch.micro_size=4

Trains transformer models from one file, the plan.
Results go to runs/NAME where the command is given; NAME is the plan's run.name.
"""

EPILOG = """
\b
Exit codes:
  0    success
  1    the run failed
  2    wrong command line
  3    plan invalid
  4    plugin missing, broken, ambiguous or incompatible
  129  hung up (SIGHUP, as of a terminal that was closed)
  130  interrupted (Ctrl-C)
  131  quit (SIGQUIT), with ranks on this machine
  138  warned by the batch system (SIGUSR1)
  140  warned by the batch system (SIGUSR2)
  143  terminated (SIGTERM)
  152  warned by the batch system (SIGXCPU)
"""


class Commands(TyperGroup):
    """Lists our commands, then those of other packages, without importing any of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of our commands, then those of other packages."""
        return [*self.commands, *(name for name in foreign() if name not in self.commands)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands for `--help`, section by section."""
        names = self.list_commands(ctx)
        width = max(map(len, names))
        others = {name: foreign_summary(name) for name in names if name not in self.commands}
        missing = {name: package for name, package in PACKAGES.items() if name not in foreign()}
        absent = {name: f"{COMMANDS[name]} (sley-{package})" for name, package in missing.items()}
        for title, section in {**SECTIONS, "Of other packages": others, "Not installed": absent}.items():
            dim = title == "Not installed"
            rows = {name: summary for name, summary in section.items() if dim or name not in missing}
            if rows:
                with formatter.section(title):
                    cells = [(name.ljust(width), summary) for name, summary in rows.items()]
                    formatter.write_dl([tuple(typer.style(cell, dim=True) for cell in row) for row in cells] if dim else cells)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command; one of another package as a LazyCommand."""
        if cmd_name in self.commands or cmd_name not in foreign():
            return super().get_command(ctx, cmd_name)
        return LazyCommand(cmd_name, foreign_summary(cmd_name), partial(load_foreign, cmd_name), _common())


def command() -> Any:
    """Returns the click command of the whole program, to be called with arguments and `obj=Settings()`."""
    group = typer.main.get_command(_app)
    assert isinstance(group, Commands), group
    common = _common()
    group.params.extend(common)
    for name, summary in COMMANDS.items():
        load = of_sley(name, PACKAGES[name]) if name in PACKAGES else own(name)
        group.add_command(LazyCommand(name, summary, load, common))
    return group


def _set_format(context: typer.Context, value: MessageFormat | None) -> None:
    if value is not None:
        context.ensure_object(Settings).message_format = value


def _set_traceback(context: typer.Context, value: bool) -> None:
    context.ensure_object(Settings).traceback |= value


def _common() -> list[Any]:
    """Returns the parameters of every command; they go into its context's Settings, not to its function."""

    def options(
        message_format: Annotated[
            MessageFormat | None,
            typer.Option(callback=_set_format, expose_value=False, help="The form in which problems are shown."),
        ] = None,
        traceback: Annotated[
            bool, typer.Option("--traceback", callback=_set_traceback, expose_value=False, help="Show where an error arose.")
        ] = False,
    ) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(options)
    return list(typer.main.get_command(app).params)


def _print_versions(wanted: bool) -> None:
    """Prints the versions and exits, for `--version`."""
    if wanted:
        from train_cli.machine_facts import sley_versions

        for name, version in sley_versions().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print the versions of Sley's packages.")
    ] = False,
) -> None: ...


_app = typer.Typer(
    name="train-cli",
    cls=Commands,
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_app.callback()(_root)
