"""The commands `estimate`, `search` and `calibrate`."""
