"""Optimizers, parameter groups and learning rates."""
