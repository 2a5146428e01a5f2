"""Sley's optimizer Muon, and its averages of the weights over steps."""
