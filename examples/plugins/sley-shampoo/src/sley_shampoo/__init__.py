"""Shampoo for Sley: an optimizer that reads whole matrices."""
