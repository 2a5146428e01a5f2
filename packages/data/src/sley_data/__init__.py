"""Datasets of text files and of token files, for Sley."""
