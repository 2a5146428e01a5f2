"""Numbers of a training that only look at it: a plugin for Sley that uses its public modules alone."""
