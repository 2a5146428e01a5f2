"""Sums only the largest elements of gradients. Uses only the public modules of Sley."""
