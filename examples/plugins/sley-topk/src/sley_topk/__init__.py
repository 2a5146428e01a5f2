"""Gradients of which the largest elements travel: a plugin for Sley that uses its public modules alone."""
