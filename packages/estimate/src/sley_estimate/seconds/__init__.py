"""Seconds of a step: programs of all stages, run in simulated time on lanes. No torch in here."""
