"""The plan: what a person writes, read strictly, located to the character, resolved with every default shown."""
