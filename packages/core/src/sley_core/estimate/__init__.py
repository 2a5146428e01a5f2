"""What a run will need, told before a device is touched."""
