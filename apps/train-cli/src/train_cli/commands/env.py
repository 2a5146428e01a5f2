"""`train-cli env`: what a report of a problem needs to say about the machine."""

from __future__ import annotations

import json

import typer

from train_cli.machine_facts import machine_facts
from train_cli.options import FormatOption, OutputFormat


def env(form: FormatOption = OutputFormat.text) -> None:
    """Print versions and devices, to paste into an issue."""
    found = machine_facts()
    if form is OutputFormat.json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        typer.echo(f"{name:{width}}  {value}")
