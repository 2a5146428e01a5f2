"""Metrics writers for TensorBoard and for Weights & Biases, for Sley."""
