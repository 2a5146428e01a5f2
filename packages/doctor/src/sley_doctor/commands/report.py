"""`train-cli report RUN...`: writes one self-contained HTML page about one or more runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sley_core.discovery import install_hint
from sley_core.errors import PluginError, UsageError
from sley_core.whole_files import write_atomically
from train_cli.console import say

NAME = "report.html"
_REQUIRED_MODULES = ("matplotlib", "jinja2")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs: runs/NAME.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help=f"The file to write; by default {NAME} in the run folder, or in the current folder for several runs.",
        ),
    ] = None,
) -> None:
    """Write one HTML page about runs: curves, a step, memory, counts, the plan with its origins, the environment."""
    if missing := [name for name in _REQUIRED_MODULES if find_spec(name) is None]:
        raise PluginError(
            "report-missing",
            f"a report needs {' and '.join(f'`{name}`' for name in missing)}, which are not installed",
            hint=install_hint("doctor", "report"),
        )
    from sley_doctor.run_report.page import read_runs, render_page

    recorded_runs = read_runs(runs)
    file = out or (runs[0] / NAME if len(runs) == 1 else Path(NAME))
    text = render_page(recorded_runs)
    try:
        write_atomically(file, text)
    except OSError as error:
        message = f"cannot write `{file}`: {error.strerror or error}"
        raise UsageError("report-file", message, hint="use another `--out`") from error
    say(f"wrote {file}: {len(text.encode()) / 1e3:.0f} kB")
