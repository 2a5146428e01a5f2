"""Sley's metrics writers for TensorBoard and Weights & Biases."""
