"""The memory of a run, and its transfers off the device and back."""
