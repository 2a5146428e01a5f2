"""The commands of `train-cli`. Each command is a function, or a `typer.Typer`, with the name of the command."""
