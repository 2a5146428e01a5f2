"""Weights in safetensors files: several of them with an index, read and written tensor by tensor."""
