"""The recorded step of a plan, and its seconds on a machine."""
