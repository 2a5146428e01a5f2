"""Cuts a list of layers into the positions of a pipeline: pure functions of the layers' costs. No torch in here."""
