"""The core of a training step: the parameter registry, the gradient store, reductions, masters and calls of layers."""
