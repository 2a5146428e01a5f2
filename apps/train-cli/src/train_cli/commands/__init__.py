"""One module per command, each with one function of the command's name."""
