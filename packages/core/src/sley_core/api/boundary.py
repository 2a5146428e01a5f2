"""Gives stage links the form of what crosses from one stage to the next: tensors within nested containers."""

from sley_core.engine.boundary import FLAG_BYTES, Description, Leaf, gradients_of, with_overlaps

__all__ = ["FLAG_BYTES", "Description", "Leaf", "gradients_of", "with_overlaps"]
