"""Models as ordered lists of named layers, and how they are built and initialised."""
