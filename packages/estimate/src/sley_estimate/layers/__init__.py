"""Operators, keys and seconds of layers."""
