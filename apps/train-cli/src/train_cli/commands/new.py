"""`train-cli new KIND NAME`: a plugin package that is complete and passes its tests, to be changed from there."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from train_cli.console import say
from train_cli.package import rendered, write


class PluginKind(StrEnum):
    """What the plugin offers to plans."""

    handler = "handler"
    hook = "hook"
    schedule = "schedule"
    writer = "writer"
    model = "model"


def new(
    kind: Annotated[
        PluginKind,
        typer.Argument(
            help="handler: of gradients. hook: called around every action. schedule: of the learning rate. writer: of metrics. "
            "model: a list of layers.",
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The plugin's name, which plans will say.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="A folder that does not exist yet, or is empty; sley-NAME if left out."
        ),
    ] = None,
) -> None:
    """Write a plugin package with a record, a table, a class and passing tests."""
    folder = out or Path(f"sley-{name.replace('_', '-')}")
    files = rendered(kind, name)
    write(files, folder)
    for path in files:
        say(f"{folder / path}")
    say(f"next: cd {folder} && pip install -e . pytest && pytest")
