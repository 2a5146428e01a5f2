"""Plans: reading, locating, resolving, checking and writing them."""
