"""Observes training without changing it. Uses only the public modules of Sley."""
