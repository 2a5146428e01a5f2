"""Memory of a run for Sley, plugin `memory`: what leaves the device and comes back, and pools of buffers."""
