"""Decoders for Sley, and their weights in and out of Hugging Face's layout."""
