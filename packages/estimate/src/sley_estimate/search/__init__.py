"""Lists the layouts that a plan can have with the installed plugins, and finds the fastest that fit in memory."""
