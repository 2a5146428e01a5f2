"""`train-cli schema`: the JSON Schema of a plan, for editors."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of a plan with the records of the installed plugins."""
    from train_cli.plan_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
