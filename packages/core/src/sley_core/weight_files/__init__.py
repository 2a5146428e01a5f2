"""Reads and writes weights in one safetensors file, or in several files with an index, tensor by tensor."""
