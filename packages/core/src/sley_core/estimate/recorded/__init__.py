"""Steps that were taken on tensors without values, written down: what was computed and exchanged, what waited for what."""
