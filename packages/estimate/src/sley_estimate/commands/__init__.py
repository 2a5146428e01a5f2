"""Implements the commands `train-cli estimate`, `search` and `calibrate`."""
