"""Embeddings whose tables the ranks of `wp` share by their hidden dim."""
