"""A step as a list of actions: made by a pure function, lowered, then executed, simulated or drawn. Does not import torch."""
