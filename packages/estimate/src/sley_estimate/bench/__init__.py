"""Times the layers of a model one at a time."""
