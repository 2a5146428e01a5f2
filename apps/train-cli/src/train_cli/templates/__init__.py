"""The packages that `train-cli new` writes: files of each kind, in which `@name@` and `NAME` stand for the plugin's name."""
