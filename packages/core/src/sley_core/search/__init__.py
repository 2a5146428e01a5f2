"""The layouts that a plan could have in a world, from what is installed. No torch in here."""
