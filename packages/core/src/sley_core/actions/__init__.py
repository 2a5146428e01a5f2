"""Describes a step as a list of actions, which can be executed, simulated or drawn. Does not import torch."""
