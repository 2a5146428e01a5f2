"""The layouts that a plan could have in a world, from what is installed, and the fastest of them that fit."""
