"""A gradient handler that sends half the bytes."""
