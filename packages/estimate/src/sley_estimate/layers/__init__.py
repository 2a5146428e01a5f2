"""Counts the operators of layers, identifies equal layers by keys, and computes the times of layers."""
