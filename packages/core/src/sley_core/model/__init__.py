"""Models as ordered lists of named layers: how they are given, built and initialised, and one of our own."""
