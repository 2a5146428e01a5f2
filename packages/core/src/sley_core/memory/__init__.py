"""Knows what a run's memory holds, and moves it off the device and back."""
