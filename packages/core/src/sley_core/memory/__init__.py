"""What a run's memory holds, and how it leaves the device and comes back."""
