"""Lists the contents of a run's memory, and moves them off the device and back."""
