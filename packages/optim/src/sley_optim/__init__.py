"""Sley's averages of the weights over steps."""
