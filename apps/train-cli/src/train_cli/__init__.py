"""Sley's command line, such as `train-cli run plan.toml`. Torch is imported only by the commands that need it."""
