"""Sley's plugin `memory`: offloads a run's memory to the host, and recomputes layers except for their attention."""
