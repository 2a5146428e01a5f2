"""Where in a layer the gathers ahead start."""
