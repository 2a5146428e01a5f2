"""Steps that were taken on tensors without values, written down: what was computed, what was exchanged, what waited for what."""
