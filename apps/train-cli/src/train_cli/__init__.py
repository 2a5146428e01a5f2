"""The command of Sley: `train-cli run plan.toml`. Imports only `sley_core`; torch only where ranks are started."""
