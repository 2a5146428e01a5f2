"""The command line of `train-cli`: imports a command only when it is called, and turns errors into diagnostics and exit codes.

Other packages add commands with entry points of the `sley.commands` group. For example, this adds `train-cli sweep`:

    [project.entry-points."sley.commands"]
    sweep = "my_package.sweep:sweep"          # a function with Typer's annotations, or a typer.Typer
"""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sley_core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, PluginError, install_hint
from train_cli.console import Settings, print_fault
from train_cli.faults import Fault
from train_cli.stopping import TerminationInterrupt

ENTRY_POINT_GROUP = "sley.commands"
"""The group of entry points by which other packages add commands."""

HELP_SECTIONS = {
    "Prepare": {
        "new": "Write a plugin package to start from.",
        "plugins": "List installed plugins, records and their options.",
        "check": "Find every mistake of one or more plans.",
        "show": "Show the resolved plan, ranks and groups.",
        "data": "Show the data as a plan's model receives it.",
    },
    "Estimate": {
        "estimate": "Estimate how much memory each stage needs.",
        "search": "Find the fastest layouts that fit.",
        "calibrate": "Measure this machine for estimates of step times.",
    },
    "Train": {"run": "Train.", "verify": "Compare a plan's layout with a single-process run."},
    "Inspect and use runs": {
        "doctor": "Find out why a run failed, or which rank is slow.",
        "report": "Write an HTML page about runs, with curves and tables.",
        "eval": "Print the held-out loss of a run's weights.",
        "sample": "Generate text from a run's weights.",
        "chat": "Talk to a trained model.",
        "export": "Write a run's weights for other programs.",
        "env": "Print versions and devices for a bug report.",
    },
}
"""The summaries of Sley's commands by name, in the sections of `--help`."""

COMMAND_PACKAGES = {
    **dict.fromkeys(("estimate", "search", "calibrate"), "estimate"),
    **dict.fromkeys(("doctor", "report"), "doctor"),
}
"""Maps a command to the package that defines it, without the prefix `sley-`. `train-cli` itself defines all other commands."""

COMMAND_MODULES = {
    "check": "plan",
    "show": "plan",
    "verify": "run",
    "chat": "sample",
    "eval": "sample",
    "new": "plugins",
    "env": "plugins",
}
"""Maps a command to the module in `train_cli.commands` that defines it, if command and module have different names."""

COMMAND_SUMMARIES = {name: summary for section in HELP_SECTIONS.values() for name, summary in section.items()}
"""The summaries of Sley's commands, by name."""

# The text of `train-cli --help`. `\b` makes click keep the line breaks of a paragraph.
HELP = """
\b
Examples:
  train-cli run plan.toml
  train-cli check plan.toml --set batch.micro_size=4

Trains transformer models from one file, the plan.
Results go to runs/NAME in the current folder; NAME is the plan's run.name.
"""

EPILOG = """
\b
Exit codes:
  0    success
  1    the run failed
  2    wrong command line
  3    plan invalid
  4    plugin missing, broken, ambiguous or incompatible
  129  hung up (SIGHUP, for example of a closed terminal)
  130  interrupted (Ctrl-C)
  138  warned by the batch system (SIGUSR1)
  140  warned by the batch system (SIGUSR2)
  143  terminated (SIGTERM)
  152  warned by the batch system (SIGXCPU)
"""


@contextmanager
def disable_gc() -> Iterator[None]:
    """Disables Python's garbage collector within the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_to_exit_code(function: Callable[[], int | None]) -> int:
    """Calls `function` and returns an exit code: its result, 0 for None, or the code of an interrupt or SystemExit."""
    try:
        with disable_gc():  # imports allocate much and free little; training enables the collector
            return function() or EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except TerminationInterrupt as interrupt:
        return interrupt.code
    except SystemExit as exit_request:
        code = exit_request.code or EXIT_OK
        return code if isinstance(code, int) else EXIT_RUN_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, prints its error if it fails, and returns the exit code. argv: the arguments; None for `sys.argv[1:]`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    settings = Settings(prints_traceback="--traceback" in arguments)
    arguments = [argument for argument in arguments if argument != "--traceback"]  # it may be before or after a command
    try:
        # Errors are handled here, since Typer would print a traceback and exit with code 1.
        return run_to_exit_code(lambda: build_command().main(arguments, prog_name="train-cli", obj=settings))
    except Exception as error:
        fault = Fault.from_error(error)
        print_fault(fault, settings)
        return fault.exit_code
    finally:
        if argv is None:
            gc.freeze()  # else Python would search all modules for garbage at exit, for almost a second


class CommandGroup(TyperGroup):
    """The click group of Sley's commands and the commands of other packages. `--help` imports none of these commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the names and summaries of all commands for `--help`, section by section."""
        width = max(map(len, self.commands))
        foreign_commands = find_foreign_commands()
        foreign = {name: str(command.help) for name, command in self.commands.items() if name not in COMMAND_SUMMARIES}
        for title, section in {**HELP_SECTIONS, "From other packages": foreign}.items():
            if section:
                lines = []
                for name, summary in section.items():
                    is_missing = name in COMMAND_PACKAGES and name not in foreign_commands
                    suffix = f" (needs sley-{COMMAND_PACKAGES[name]})" if is_missing else ""
                    lines.append((name.ljust(width), summary + suffix))
                with formatter.section(title):
                    formatter.write_dl(lines)


class LazyCommand(TyperCommand):
    """A click command that imports the function of the command `name` only when it is called or its help is printed."""

    def __init__(self, name: str) -> None:
        summary = COMMAND_SUMMARIES.get(name) or f"A command of {_format_distributions(find_foreign_commands()[name])}."
        super().__init__(name, help=summary, short_help=summary, rich_markup_mode=None)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        function = _load_command(str(self.name))
        app = function
        if not isinstance(function, typer.Typer):
            app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            app.command(self.name)(function)
        return typer.main.get_command(app).make_context(info_name, args, parent, **extra)


def build_command() -> Any:
    """Returns the click command of the whole program. Call its `main` with arguments and `obj=Settings()`."""
    group = typer.main.get_command(_app)
    assert isinstance(group, CommandGroup), group
    for name in dict.fromkeys((*COMMAND_SUMMARIES, *find_foreign_commands())):
        group.add_command(LazyCommand(name))
    return group


def _load_command(name: str) -> Any:
    """Imports the command `name` and returns its function or Typer app. Raises PluginError: "command-missing" if its package is
    not installed, "command-ambiguous" if several packages define it, and "command-import" if its import fails.
    """
    if name in COMMAND_PACKAGES:
        import_optional(COMMAND_PACKAGES[name], f"sley_{COMMAND_PACKAGES[name]}", f"`train-cli {name}`")
    elif name in COMMAND_SUMMARIES:
        return getattr(import_module(f"train_cli.commands.{COMMAND_MODULES.get(name, name)}"), name)
    points = find_foreign_commands()[name]
    dists = _format_distributions(points)
    if len(points) > 1:
        message = f"several packages have a command `{name}`: {dists}"
        raise PluginError("command-ambiguous", message, hint="uninstall one of them")
    try:
        return points[0].load()
    except Exception as error:
        message = f"the command `{name}` of {dists} cannot be imported: {type(error).__name__}: {error}"
        raise PluginError("command-import", message, hint="reinstall the package, or report this to its authors") from error


def import_optional(package: str, module: str, feature: str) -> Any:
    """Returns `module` of `sley-<package>`, which `feature` needs. Raises PluginError "command-missing" without the package."""
    if find_spec(module.partition(".")[0]) is None:
        message = f"{feature} needs sley-{package}, which is not installed"
        raise PluginError("command-missing", message, hint=install_hint(package))
    return import_module(module)


@cache
def find_foreign_commands() -> dict[str, tuple[EntryPoint, ...]]:
    """Returns the entry points of other packages' commands, by the name of the command. Several packages may use one name."""
    commands: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        commands[point.name] = (*commands.get(point.name, ()), point)
    return commands


def _format_distributions(points: Sequence[EntryPoint]) -> str:
    return " and ".join(f"{point.dist.name} {point.dist.version}" if point.dist else point.value for point in points)


def _print_versions(is_requested: bool) -> None:
    if is_requested:
        from train_cli.environment import find_sley_versions

        for name, version in find_sley_versions().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit


def _define_root_options(  # gives Typer the options of `train-cli` itself; `main` reads --traceback
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print the versions of Sley's packages.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error; also as an option of a command.")
    ] = False,
) -> None: ...


_app = typer.Typer(
    name="train-cli",
    cls=CommandGroup,
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_app.callback()(_define_root_options)
