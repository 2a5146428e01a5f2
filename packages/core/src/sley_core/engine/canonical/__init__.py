"""Sums in one fixed order, whatever the layout: `[parallel] reduction = "canonical"`."""
