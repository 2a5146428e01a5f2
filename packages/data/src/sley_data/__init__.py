"""Datasets for Sley: text, conversations, token files, and mixtures of datasets."""
