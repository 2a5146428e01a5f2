"""Losses, each with a weight that depends only on the batch, and a sum."""
